"""A signal is heard from the first moment of a command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvspan.cli import COMMANDS
from kvspan.start import EXIT_INTERRUPTED, SERVING

ROOT = Path(__file__).parents[3]

CODE = """
import signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "click": signal.raise_signal(int(sys.argv[2]))
sys.meta_path.insert(0, Finder())
from kvspan.start import main
sys.exit(main())
"""
"""Receives a signal while the modules of the command line are imported."""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("decode", signal.SIGTERM, 0),
        ("up", signal.SIGINT, 0),
        ("status", signal.SIGTERM, 128 + signal.SIGTERM),
        ("status", signal.SIGINT, EXIT_INTERRUPTED),
    ],
)
def test_signal_before_the_command_line_is_read_ends_a_command_in_order(
    command: str, number: signal.Signals, code: int
) -> None:
    """What serves was ended as it is meant to be; others say by what."""
    line = [sys.executable, "-c", CODE, command, str(int(number))]

    done = subprocess.run(line, check=False, capture_output=True, cwd=ROOT, timeout=60)

    assert (done.returncode, done.stderr) == (code, b"")


def test_commands_that_serve_are_commands() -> None:
    """A name that is changed in one place is changed in both."""
    assert {command.name for command in COMMANDS} > SERVING
