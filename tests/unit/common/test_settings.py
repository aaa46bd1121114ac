"""Types of settings take what is right, and refuse all else with the value and its bounds."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest

from common.errors import ConfigError
from common.settings import (
    LONGEST_S,
    SECONDS,
    TARGET,
    Address,
    Number,
    ServiceConfig,
    Size,
    setting_text,
    size_text,
)
from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig

LISTEN = Address(to_listen=True)
DECODE = DecodeConfig(model="tiny:llama", listen="unix:/a")
PREFILL = PrefillConfig(model="tiny:llama", listen="unix:/a")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("3KiB", 3 << 10), ("5mib", 5 << 20), ("2 GiB", 2 << 30), ("7B", 7)],
)
def test_size_takes_binary_units(text: str, num_bytes: int) -> None:
    """A size is bytes, alone or with a binary unit."""
    assert Size(1).convert(text, None, None) == num_bytes


@pytest.mark.parametrize(
    ("kind", "text", "rule"),
    [
        (Size(1), "5MB", "5MB is not a size such as"),
        (Size(1), "-1", "-1 is not a size such as"),
        (Size(1), "", "is not a size such as"),
        (Size(1), "9" * 40, "is not a size such as"),
        (Size(2 << 20), "1MiB", "1MiB is not in the range 2MiB<=x<=1024GiB"),
        (Size(1), "1025GiB", "1025GiB is not in the range 1<=x<=1024GiB"),
        (Size(1, 4096), "5000", "5000 is not a multiple of 4KiB"),
        (SECONDS, "nan", "nan is not in the range 0<x<=604800"),
        (SECONDS, "inf", "inf is not in the range"),
        (SECONDS, "0", "0.0 is not in the range"),
        (SECONDS, "1e12", "1000000000000.0 is not in the range"),
        (SECONDS, "fast", "'fast' is not a valid"),
        (Number(0), "nan", "nan is not in the range 0<=x"),
        (LISTEN, "localhost", "'localhost' must be host:port or unix:PATH"),
        (LISTEN, "127.0.0.1:65536", "port must be in"),
        (LISTEN, "unix:", "needs a path"),
        (TARGET, "127.0.0.1:0", "'127.0.0.1:0' must name a port above 0"),
    ],
)
def test_wrong_text_is_refused_with_the_rule(kind: click.ParamType[Any], text: str, rule: str) -> None:
    """The message has the value that was given and what it must be."""
    with pytest.raises(click.BadParameter) as refusal:
        kind.convert(text, None, None)

    assert rule in refusal.value.message


@pytest.mark.parametrize("address", ["127.0.0.1:0", "host.local:50051", "[::1]:7", "unix:/tmp.sock"])
def test_address_is_kept_as_it_was_given(address: str) -> None:
    """A good address is handed on unchanged."""
    assert LISTEN.convert(address, None, None) == address


@pytest.mark.parametrize("kind", [DecodeConfig, PrefillConfig])
def test_every_number_has_two_bounds(kind: type[ServiceConfig]) -> None:
    """No setting can be so large that something overflows later."""
    numbers = [field for field in dataclasses.fields(kind) if field.type in ("int", "float")]

    assert len(numbers) > 8
    for field in numbers:
        bounds = field.metadata["type"]
        assert bounds.min is not None, field.name
        assert bounds.max is not None, field.name
        assert round(bounds.max * 1e9) < 2**63 or not field.name.endswith("_s")


@pytest.mark.parametrize("config", [DECODE, PREFILL])
def test_defaults_are_allowed_by_their_own_types(config: ServiceConfig) -> None:
    """What a field has when nobody says anything could have been said."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, tuple | bool):
            assert field.metadata["type"].convert(setting_text(field, value), None, None) == value


@pytest.mark.parametrize(
    ("config", "changes", "refusal"),
    [
        (DECODE, {"chunk_tokens": 96}, "page_tokens=64: must divide --chunk-tokens=96"),
        (DECODE, {"cache_tokens": 128}, "cache_tokens=128: must be at least --chunk-tokens=256"),
        (DECODE, {"route": "remote"}, "route=remote: needs a service, has --prefill="),
        (DECODE, {"prefill": ("unix:/b", "unix:/b")}, "prefill=unix:/b,unix:/b: must name each service once"),
        (DECODE, {"prefill": ("unix:/a",)}, "prefill=unix:/a: must differ from --listen=unix:/a"),
        (
            PREFILL,
            {"min_span_bytes": 2 << 20},
            "min_span_bytes=2097152: must not exceed --max-span-bytes=1MiB",
        ),
        (
            PREFILL,
            {"max_slabs_bytes": 1 << 30},
            "max_slab_bytes=4294967296: must not exceed --max-slabs-bytes=1GiB",
        ),
    ],
)
def test_no_config_breaks_a_rule_between_its_fields(
    config: ServiceConfig, changes: dict[str, Any], refusal: str
) -> None:
    """Whoever makes one, by flags or in Python, is told the field and both values."""
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(config, **changes)

    assert str(caught.value) == refusal


@pytest.mark.parametrize(("num_bytes", "text"), [(256 << 20, "256MiB"), (3 << 30, "3GiB"), (1000, "1000")])
def test_size_is_written_in_the_largest_unit_that_divides_it(num_bytes: int, text: str) -> None:
    """What help prints can be given back as a flag."""
    assert size_text(num_bytes) == text
    assert Size(1).convert(text, None, None) == num_bytes


def test_slabs_are_handed_over_where_sockets_of_this_user_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a directory is named; one that the shell of another user left behind is passed over."""
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere")
    named = dataclasses.replace(DECODE, slab_dir="/named")

    folders = []
    for runtime in (str(tmp_path), "/no/such/folder", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        folders.append(DECODE.slab_folder)

    assert folders == [tmp_path, Path("/somewhere"), Path("/somewhere")]
    assert named.slab_folder == Path("/named")


def test_the_longest_time_is_a_week() -> None:
    """Well below what nanoseconds in 64 bits, a deadline of grpc and a timer of the loop can hold."""
    assert SECONDS.convert(str(LONGEST_S), None, None) == 7 * 86400
