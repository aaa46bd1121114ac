"""`kvspan up` hands what it was told on to both services."""

from __future__ import annotations

import argparse

import pytest

from common.errors import ConfigError
from kvspan.commands.up import UP, make_plan

PREFILL = "unix:/run/prefill.sock"


def parse(*line: str) -> argparse.Namespace:
    """Return the arguments of a command line."""
    parser = argparse.ArgumentParser()
    UP.add_arguments(parser)
    return parser.parse_args(line)


def test_each_service_is_told_what_concerns_it() -> None:
    """Shared settings reach both; decode learns where prefill listens."""
    plan = make_plan(
        parse("--model=tiny:llama", "--page-tokens=32", "--lanes=3", "--max-concurrency=5"), PREFILL
    )

    assert set(plan.decode_command[5:]) == {
        "--model=tiny:llama", "--listen=127.0.0.1:50051", f"--prefill={PREFILL}", "--page-tokens=32",
        "--lanes=3", "--log-level=info",
    }  # fmt: skip
    assert set(plan.prefill_command[5:]) == {
        "--model=tiny:llama", f"--listen={PREFILL}", "--page-tokens=32", "--max-concurrency=5",
        "--log-level=info",
    }  # fmt: skip


def test_each_service_writes_its_own_journal() -> None:
    """Two writers would break the chain of one file."""
    plan = make_plan(parse("--model=tiny:llama", "--journal=/tmp/run.jsonl"), PREFILL)

    assert "--journal=/tmp/run.decode.jsonl" in plan.decode_command
    assert "--journal=/tmp/run.prefill.jsonl" in plan.prefill_command


def test_child_is_killed_only_after_its_grace() -> None:
    """A service that drains within its grace is never cut."""
    assert make_plan(parse("--model=tiny:llama", "--grace-s=33"), PREFILL).kill_after_s > 33


@pytest.mark.parametrize("flag", ["--lanes=0", "--max-concurrency=0", "--chunk-tokens=65"])
def test_what_either_service_would_refuse_is_refused_before_both(flag: str) -> None:
    """No process is started for a setting that ends one of them."""
    with pytest.raises(ConfigError):
        make_plan(parse("--model=tiny:llama", flag), PREFILL)
