"""The command line answers at once, and every outcome has its exit code."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, PeerUnavailable
from kvspan import cli
from kvspan.commands.command import EXIT_FAILED, EXIT_USAGE, Command

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "grpc", "numpy")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvspan --help` is the list of what there is."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])

    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(command.name in text and command.summary[:30] in text for command in cli.COMMANDS)


def test_command_line_loads_nothing_heavy_before_it_runs() -> None:
    """Help and a bad value answer at once: no compute or network library is loaded for them."""
    code = (
        "import sys; from kvspan import cli; code = cli.main(['up', '--model=tiny:none']);"
        f"print(code, [name for name in {HEAVY} if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)

    assert done.stdout.strip() == f"{EXIT_USAGE} []"


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (["up", "--lanes=0"], "kvspan: --lanes=0: must be at least 1\n"),
        (["decode", "--model=demo", "--listen=50051"], "kvspan: --listen=50051: must be host:port or"),
        (
            ["prefill", "--model=demo", "--listen=a:1", "--threads=-1"],
            "kvspan: --threads=-1: must be at least 0\n",
        ),
        (
            ["up", "--chunk-tokens=100"],
            "kvspan: --chunk-tokens=100: must be a multiple of --page-tokens=64\n",
        ),
        (["up", "--min-span-bytes=9MiB"], "kvspan: --min-span-bytes=9437184: must not exceed"),
        (["up", "--ready-timeout-s=0"], "kvspan: --ready-timeout-s=0: must be above 0\n"),
        (["health", "nowhere"], "kvspan: TARGET=nowhere: must be host:port or unix:PATH"),
    ],
)
def test_bad_value_is_refused_before_anything_starts(
    line: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad value is one line on stderr that names flag, text and rule; the exit code is 2."""
    code = cli.main(line)

    captured = capsys.readouterr()
    assert code == EXIT_USAGE
    assert captured.err.startswith(refusal)
    assert captured.out == ""


@pytest.mark.parametrize(
    "line", [[], ["fly"], ["decode", "--model=demo"], ["up", "--lan=3"], ["up", "--nope=1"]]
)
def test_line_that_cannot_be_read_exits_with_usage(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown command, an unknown or shortened flag and a missing one are all mistakes of usage."""
    with pytest.raises(SystemExit) as ended:
        cli.main(line)

    assert ended.value.code == EXIT_USAGE
    assert "usage: kvspan" in capsys.readouterr().err


def failing_with(error: BaseException) -> Command:
    """Return a command that raises `error`."""

    def run(arguments: argparse.Namespace) -> int:
        raise error

    return Command("fail", "raises", lambda parser: None, run)


@pytest.mark.parametrize(
    ("error", "code", "complaint"),
    [
        (ConfigError("slab_bytes", 7, "is too small"), EXIT_USAGE, "kvspan: --slab-bytes=7: is too small\n"),
        (PeerUnavailable("no prefill"), EXIT_FAILED, "kvspan: PREFILL_UNAVAILABLE: no prefill\n"),
        (KeyboardInterrupt(), cli.EXIT_INTERRUPTED, ""),
    ],
)
def test_error_of_a_running_command_becomes_one_line_and_a_code(
    error: BaseException,
    code: int,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever ends a command, the operator reads one line and never a traceback."""
    monkeypatch.setattr(cli, "COMMANDS", (failing_with(error),))

    assert cli.main(["fail"]) == code
    assert capsys.readouterr().err == complaint


def test_command_names_are_unique() -> None:
    """No command hides another."""
    names = [command.name for command in cli.COMMANDS]

    assert len(set(names)) == len(names)
