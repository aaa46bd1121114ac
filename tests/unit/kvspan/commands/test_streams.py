"""Whatever becomes of its standard streams, a command ends with its exit code and at most one line."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from kvspan.commands.command import CommandFailed, tell
from kvspan.commands.streams import Output

ROOT = Path(__file__).parents[4]

PRINTS = "import sys; from kvspan import cli; sys.exit(cli.main(sys.argv[1:]))"


def run(line: str, streams: str, **environ: str) -> tuple[int, str]:
    """Run a command line with its streams led elsewhere; return its exit code and what reached stderr."""
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", PRINTS, *line.split()]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environ}
    )
    return done.returncode, done.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("line", "streams", "code", "said"),
    [
        ("--help", ">/dev/full", 1, "kvspan: writing to stdout failed: No space left on device\n"),
        ("fly", "2>/dev/full", 2, ""),
        ("decode --log-json", "2>/dev/full", 2, ""),
    ],
)
def test_a_disk_that_is_full_is_one_line_and_a_code(
    line: str, streams: str, code: int, said: str, unbuffered: str
) -> None:
    """Of what went to stderr nobody can be told, and the exit code is what it would have been."""
    assert run(line, streams, PYTHONUNBUFFERED=unbuffered) == (code, said)


@pytest.mark.multiprocess
def test_a_reader_that_is_gone_is_told_nothing() -> None:
    """As after `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        command = [sys.executable, "-c", PRINTS, "--help"]
        done = subprocess.run(command, check=False, stdout=nobody, stderr=subprocess.PIPE, cwd=ROOT)

    assert (done.returncode, done.stderr) == (1, b"")


def test_output_that_failed_once_goes_nowhere() -> None:
    """Else the interpreter would fail again with what is left when it ends."""
    with Output(open("/dev/full", "wb"), "utf-8") as output:
        output.write("x")
        with pytest.raises(CommandFailed, match="writing to stdout failed: No space left on device"):
            output.flush()
        output.write("y")
        output.flush()


def test_line_for_another_program_fails_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address at which a service is ready is written as bytes."""
    with io.TextIOWrapper(open("/dev/full", "wb")) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(CommandFailed, match="writing to stdout failed"):
            tell("ready 127.0.0.1:1")


ANSWER = "\x1b]0;owned\x07caf\xe9\r\x9b2J\t👩‍👧\n"


def test_terminal_gets_what_would_steer_it_by_numbers() -> None:
    """An answer may say anything; line breaks, tabs and all that is text stay."""
    master, terminal = pty.openpty()
    with Output(open(terminal, "wb"), "utf-8") as output:
        output.write(ANSWER)
        output.flush()
        shown = os.read(master, 1000)
    os.close(master)

    assert shown.decode() == "\\x1b]0;owned\\x07caf\xe9\\r\\x9b2J\t👩‍👧\r\n"


def test_file_gets_an_answer_as_it_is(tmp_path: Path) -> None:
    """Whoever reads it decides."""
    with Output(open(tmp_path / "answer", "wb"), "utf-8", newline="") as output:
        output.write(ANSWER)

    assert (tmp_path / "answer").read_bytes() == ANSWER.encode()
