"""One table makes the flags of all services, and refuses what a config must not hold."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.kv.digest import DigestKind
from common.session.messages import TransferMode
from decode_service.config import DecodeConfig
from kvspan.commands import flags
from prefill_service.config import PrefillConfig

NEEDED = {"model": "tiny:llama", "listen": "127.0.0.1:0"}


@pytest.mark.parametrize("kind", [PrefillConfig, DecodeConfig])
def test_every_field_of_a_config_has_one_flag(kind: type[flags.ServiceConfig]) -> None:
    """No setting exists that cannot be given, and none is named twice."""
    names = [flag.field for flag in flags.FLAGS]

    assert {field.name for field in dataclasses.fields(kind)} <= set(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", [PrefillConfig, DecodeConfig])
def test_defaults_of_a_config_pass_its_own_checks(kind: type[flags.ServiceConfig]) -> None:
    """A service starts when only model and address are given."""
    config = flags.build_config(kind, NEEDED)

    assert config == kind(model="tiny:llama", listen="127.0.0.1:0")


def test_given_texts_become_typed_fields(tmp_path: Path) -> None:
    """Each text is parsed as its field wants it; fields of other services are passed over."""
    texts = {
        **NEEDED,
        "prefill": ["unix:/a.sock", "127.0.0.1:7"],
        "slab_dir": str(tmp_path),
        "slab_bytes": "3MiB",
        "transfer": "whole",
        "digest": "off",
        "time_limit_s": "2.5",
        "max_concurrency": "5",
    }

    config = flags.build_config(DecodeConfig, texts)

    assert config.prefill == ("unix:/a.sock", "127.0.0.1:7")
    assert (config.slab_dir, config.slab_bytes) == (str(tmp_path), 3 << 20)
    assert (config.transfer, config.digest) == (TransferMode.WHOLE, DigestKind.OFF)
    assert config.time_limit_s == 2.5


@pytest.mark.parametrize(
    ("texts", "refusal"),
    [
        ({"lanes": "0"}, "--lanes=0: must be at least 1"),
        ({"model": "tiny:none"}, "--model=tiny:none: no such tiny model"),
        ({"chunk_tokens": "96"}, "--chunk-tokens=96: must be a multiple of --page-tokens=64"),
        ({"cache_tokens": "128"}, "--cache-tokens=128: must be at least --chunk-tokens=256"),
        ({"slab_bytes": "1048577"}, "--slab-bytes=1048577: must be a multiple of 4KiB"),
        ({"route": "remote"}, "--route=remote: needs a service"),
        ({"prefill": ["127.0.0.1:7", "127.0.0.1:7"]}, "--prefill=127.0.0.1:7,127.0.0.1:7: must name each"),
        (
            {"listen": "unix:/a", "prefill": ["unix:/a"]},
            "--prefill=unix:/a: must differ from --listen=unix:/a",
        ),
    ],
)
def test_bad_setting_is_refused_by_flag(texts: dict[str, object], refusal: str) -> None:
    """A refusal names the flag, the text given and the rule."""
    with pytest.raises(ConfigError) as caught:
        flags.build_config(DecodeConfig, {**NEEDED, **texts})

    assert str(caught.value).startswith(refusal)


def test_spans_need_room_between_their_limits() -> None:
    """The smallest span a prefill service aims at never exceeds the largest it may tell."""
    with pytest.raises(
        ConfigError, match="--min-span-bytes=2097152: must not exceed --max-span-bytes=1048576"
    ):
        flags.build_config(PrefillConfig, NEEDED | {"min_span_bytes": "2MiB"})


def test_texts_are_handed_on_only_to_services_that_have_the_field() -> None:
    """What a pair was told reaches each service as the flags that this service has."""
    texts = {"lanes": "3", "max_concurrency": "5", "page_tokens": "32", "prefill": ["unix:/a", "unix:/b"]}

    assert flags.arguments_of(PrefillConfig, texts) == ["--max-concurrency=5", "--page-tokens=32"]
    assert flags.arguments_of(DecodeConfig, texts) == [
        "--lanes=3", "--page-tokens=32", "--prefill=unix:/a", "--prefill=unix:/b",
    ]  # fmt: skip


def test_flags_collect_only_what_was_given() -> None:
    """A flag that was not given leaves the default of the config alone."""
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, DecodeConfig, without=("prefill",), defaults={"model": "demo"})

    arguments = parser.parse_args(["--listen=unix:/s", "--lanes=3"])

    assert flags.given_texts(arguments) == {"model": "demo", "listen": "unix:/s", "lanes": "3"}


def test_help_tells_defaults_in_the_units_that_flags_take() -> None:
    """Help shows what could be typed."""
    parser = argparse.ArgumentParser(prog="kvspan")
    flags.add_flags(parser, DecodeConfig)

    text = " ".join(parser.format_help().split())

    assert "shared memory of one session (default: 256MiB)" in text
    assert "(default: stream)" in text
