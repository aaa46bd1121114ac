"""The standard streams of a command: closed, full, or of a terminal that lacks characters or obeys some.

Theory of operation: whatever becomes of stdout, a command ends with its exit code and one line. Characters
that a terminal does not have are printed by their numbers, and so are those that would steer one: an answer
is text of a model, and of whoever wrote its prompt. A file or a pipe gets them as they are.

Not here: standard error that is all JSON (`common/telemetry/stderr.py`).
"""

from __future__ import annotations

import io
import os
import sys

from kvspan.commands.command import lead_nowhere, output_failure

_STEERING = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}


class Output(io.TextIOWrapper):
    """Standard output of a process; when it fails once, all further output goes nowhere."""

    def write(self, text: str, /) -> int:
        """Write a text, of which a terminal obeys line breaks and tabs alone."""
        if text == "":
            # Libraries try so what kind of stream this is, and take a failure for an answer.
            return 0
        try:
            return super().write(text.translate(_STEERING) if self.isatty() else text)
        except OSError as error:
            raise output_failure(error, self.fileno()) from error

    def flush(self) -> None:
        """Write what is left."""
        try:
            super().flush()
        except OSError as error:
            raise output_failure(error, self.fileno()) from error


def open_closed_streams() -> None:
    """Give a process that was started without standard streams streams to nowhere.

    Else the next files that are opened take their numbers, and what native code prints goes into one of them.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number is the one that was closed.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def print_any_text() -> None:
    """Print text on any standard stream, and tell how stdout fails if this process was started with it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    out = sys.stdout
    if out is sys.__stdout__ and isinstance(out, io.TextIOWrapper):
        sys.stdout = Output(
            out.buffer,
            out.encoding,
            out.errors,
            line_buffering=out.line_buffering,
            write_through=out.write_through,
        )


def note(line: str) -> None:
    """Write a line to stderr; where that fails nobody can be told, and the exit code has to do."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        lead_nowhere(sys.stderr.fileno())
