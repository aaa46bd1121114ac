"""Flags and variables of the environment follow from the configs, and lead back to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from common.kv.digest import DigestKind
from common.session.messages import TransferMode
from common.settings import ServiceConfig
from decode_service.config import DecodeConfig
from kvspan.commands.flags import arguments_of, make_config, settings_of
from prefill_service.config import PrefillConfig
from tests.support.command_lines import parse_line

NEEDED = ("--model=tiny:llama", "--listen=127.0.0.1:0")


def parse(kind: type[ServiceConfig], *line: str, **changes: Any) -> dict[str, Any]:
    """Return what a command with the settings of `kind` is given."""
    return parse_line(click.command("serve")(settings_of(kind, **changes)(lambda: None)), line)


@pytest.mark.parametrize("kind", [PrefillConfig, DecodeConfig])
def test_a_service_starts_with_a_model_and_an_address(kind: type[ServiceConfig]) -> None:
    """Every other setting has the default of its config, which keeps all rules."""
    config = make_config(kind, parse(kind, *NEEDED))

    assert config == kind(model="tiny:llama", listen="127.0.0.1:0")


def test_flags_become_typed_fields(tmp_path: Path) -> None:
    """Each text is read as its field wants it."""
    line = (
        "--prefill=unix:/a.sock", "--prefill=127.0.0.1:7", f"--slab-dir={tmp_path}", "--slab-bytes=3MiB",
        "--transfer=whole", "--digest=off", "--time-limit-s=2.5", "--log-json",
    )  # fmt: skip

    config = make_config(DecodeConfig, parse(DecodeConfig, *NEEDED, *line))

    assert config.prefill == ("unix:/a.sock", "127.0.0.1:7")
    assert (config.slab_dir, config.slab_bytes) == (str(tmp_path), 3 << 20)
    assert (config.transfer, config.digest) == (TransferMode.WHOLE, DigestKind.OFF)
    assert (config.time_limit_s, config.log_json) == (2.5, True)


@pytest.mark.parametrize("kind", [PrefillConfig, DecodeConfig])
def test_a_config_is_handed_on_whole(kind: type[ServiceConfig]) -> None:
    """Another process that is given the arguments has the same config, defaults included."""
    line = ("--prefill=unix:/a", "--prefill=unix:/b", "--digest=off") if kind is DecodeConfig else ()
    config = make_config(kind, parse(kind, *NEEDED, "--grace-s=0.1", "--journal=/tmp/j", "--log-json", *line))

    assert make_config(kind, parse(kind, *arguments_of(config))) == config


def test_the_environment_gives_what_no_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag wins over its variable, a variable over the default; several addresses stand side by side."""
    monkeypatch.setenv("KVSPAN_LANES", "3")
    monkeypatch.setenv("KVSPAN_QUEUE_LIMIT", "5")
    monkeypatch.setenv("KVSPAN_LOG_JSON", "1")
    monkeypatch.setenv("KVSPAN_PREFILL", "unix:/a unix:/b")

    given = parse(DecodeConfig, *NEEDED, "--lanes=7")

    assert (given["lanes"], given["queue_limit"], given["log_json"]) == (7, 5, True)
    assert given["prefill"] == ("unix:/a", "unix:/b")


def test_a_command_may_leave_out_settings_and_have_defaults_of_its_own() -> None:
    """What a pair decides by itself is no flag of it."""
    given = parse(DecodeConfig, "--listen=unix:/s", without=("prefill",), defaults={"model": "demo"})

    assert given["model"] == "demo"
    assert "prefill" not in given


def test_help_tells_defaults_and_bounds_in_the_units_that_flags_take() -> None:
    """Help shows what could be typed."""
    command = click.command("serve")(settings_of(DecodeConfig)(lambda: None))

    text = " ".join(command.get_help(click.Context(command)).split())

    assert "shared memory of one session [default: 256MiB; 1MiB<=x<=1024GiB]" in text
    assert "[default: stream]" in text
    assert "[default: 600; 0<x<=604800]" in text
