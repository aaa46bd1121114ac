"""`kvspan up` hands what it was told on to both services."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError
from kvspan.commands.flags import SETTINGS, flag_name
from kvspan.commands.up import make_plan, up
from tests.support.command_lines import parse_line

PREFILL = "unix:/tmp/prefill.sock"


def parse(*line: str) -> dict[str, Any]:
    """Return what a command line gives."""
    return parse_line(up, ["--model=tiny:llama", "--listen=127.0.0.1:0", *line])


OPTIONS = ("--engine-option=widths=8", "--backend-option=device=1")
"""Settings that are no part of a command line unless they are given."""


def test_each_service_is_told_what_concerns_it() -> None:
    """Settings reach every service that has them, those that were not given too; decode learns of prefill."""
    plan = make_plan(
        parse("--page-tokens=32", "--lanes=3", "--max-concurrency=5", "--log-json", *OPTIONS), PREFILL
    )

    decode, prefill = set(plan.decode_command), set(plan.prefill_command)
    assert {
        "--listen=127.0.0.1:0",
        f"--prefill={PREFILL}",
        "--lanes=3",
        "--page-tokens=32",
        "--slab-bytes=256MiB",
    } <= decode
    assert {f"--listen={PREFILL}", "--max-concurrency=5", "--min-span-bytes=512KiB"} <= prefill
    assert {"--model=tiny:llama", "--log-level=info", "--log-json"} <= decode & prefill
    assert {flag_name(field) for field in SETTINGS} <= {part.partition("=")[0] for part in decode | prefill}


def test_each_service_writes_its_own_journal() -> None:
    """Two writers would break the chain of one file."""
    plan = make_plan(parse("--journal=/tmp/run.jsonl"), PREFILL)

    assert "--journal=/tmp/run.decode.jsonl" in plan.decode_command
    assert "--journal=/tmp/run.prefill.jsonl" in plan.prefill_command


def test_child_is_killed_only_after_its_grace() -> None:
    """A service that drains within its grace is never cut."""
    assert make_plan(parse("--grace-s=33"), PREFILL).kill_after_s > 33


@pytest.mark.parametrize(
    "flag",
    [
        "--chunk-tokens=65",
        "--min-span-bytes=2MiB",
        "--model=/no/such/folder",
        "--max-slab-bytes=255MiB",
        "--journal=.",
        "--journal=..",
    ],
)
def test_what_either_service_would_refuse_is_refused_before_both(flag: str) -> None:
    """No process is started for a setting that ends one of them."""
    with pytest.raises(ConfigError):
        make_plan(parse(flag), PREFILL)
