"""Makes every line on standard error one JSON object, whoever writes it.

Theory of operation: loggers are not the only writers: libraries print bars and warnings, the interpreter
prints tracebacks, native code writes to the descriptor itself. So descriptor 2 becomes a pipe, and a thread
copies it to what it was before: lines that are JSON objects already (of child processes) as they are, others
as the text of an event `stderr.line`. Our own log goes past the pipe, so that no line of it is lost when the
process is killed, through the stream that the thread writes to: no line gets into another.

Ownership: belongs to the process; one at a time, entered and left by the thread that runs the command.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import NoReturn, TextIO

from common.telemetry.logging import FIELDS, JSONFormatter

STDERR = 2

LONGEST_LINE = 1 << 16
"""Bytes; what goes on for longer is cut into several lines."""

LAST_LINES_S = 2.0
"""How long leaving waits for what children that outlive us might still write."""

_BREAK = re.compile(rb"[\r\n]+")


@contextmanager
def json_stderr(service: str) -> Iterator[TextIO]:
    """Turn what is written to standard error into JSON lines; yields the stream for lines that are JSON."""
    before = os.dup(STDERR)
    reader, writer = os.pipe()
    sys.stderr.flush()
    os.dup2(writer, STDERR)
    os.close(writer)
    stream = open(before, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed below)
    thread = Thread(target=_copy, args=(reader, stream, JSONFormatter(service)), daemon=True)
    thread.start()
    try:
        yield stream
    finally:
        sys.stderr.flush()
        os.dup2(before, STDERR)
        thread.join(LAST_LINES_S)
        # A child that outlives us may write on: what its lines are copied with stays open then.
        if not thread.is_alive():
            os.close(reader)
            with suppress(OSError):
                stream.close()


def json_line(line: bytes, formatter: JSONFormatter) -> str:
    """Return one line of whoever as a JSON object."""
    text = line.decode(errors="backslashreplace").strip()
    try:
        if isinstance(json.loads(text, parse_constant=_refuse), dict):
            return text
    except (ValueError, RecursionError):
        pass
    record = {"levelname": "WARNING", "name": "stderr", "msg": "stderr.line", FIELDS: {"text": text}}
    return formatter.format(logging.makeLogRecord(record))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _copy(reader: int, stream: TextIO, formatter: JSONFormatter) -> None:
    """Copy until the last writer has closed the pipe."""
    rest = b""
    while part := os.read(reader, LONGEST_LINE):
        *lines, rest = _BREAK.split(rest + part)
        if len(rest) >= LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        _write(lines, stream, formatter)
    _write([rest], stream, formatter)


def _write(lines: list[bytes], stream: TextIO, formatter: JSONFormatter) -> None:
    for line in filter(bytes.strip, lines):
        # Whoever reads may be gone; without anybody who empties the pipe its writers would wait for ever.
        with suppress(OSError):
            stream.write(f"{json_line(line, formatter)}\n")
