"""Whoever writes to standard error, every line is one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.telemetry.logging import JSONFormatter
from common.telemetry.stderr import json_line

ROOT = Path(__file__).parents[4]

WRITERS = """
import os, subprocess, sys, warnings
from common.telemetry.stderr import json_stderr

with json_stderr("decode") as stream:
    print('{"event": "ours"}', file=stream)
    print("a print", file=sys.stderr)
    os.write(2, b"native\\r50%\\r100%\\n\\n\\xff")
    os.write(2, b" goes on\\n")
    warnings.warn("a warning")
    subprocess.run([sys.executable, "-c", "import sys; print('{\\"event\\": \\"child\\"}', file=sys.stderr)"])
    os.write(2, b"no end of line")
print("after", file=sys.stderr)
"""


def run(code: str) -> Sequence[str]:
    """Return the lines that a program writes to standard error."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stderr.splitlines()


def test_every_line_of_every_writer_is_one_object() -> None:
    """Print, native code, bars, warnings and child processes, in order, and nothing is lost at the end."""
    *lines, last = run(WRITERS)

    told = [json.loads(line) for line in lines]
    texts = [line["text"] for line in told if line["event"] == "stderr.line"]
    assert last == "after"
    assert {"ours", "child"} <= {line["event"] for line in told}
    assert texts[:5] == ["a print", "native", "50%", "100%", "\\xff goes on"]
    assert "UserWarning: a warning" in texts[5]
    assert texts[-1] == "no end of line"


def test_nobody_waits_for_a_reader_that_is_gone() -> None:
    """More than a pipe holds is written after whoever collected the lines has ended: the process ends too."""
    code = (
        "import os\nfrom common.telemetry.stderr import json_stderr\n"
        "with json_stderr('decode'):\n"
        "    for _ in range(2000): os.write(2, b'x' * 99 + b'\\n')\n"
        "print('done')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=nobody, timeout=60, check=False, cwd=ROOT
        )

    assert done.stdout == b"done\n"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b'{"a": 7}', "a"),
        (b"[7]", "text"),
        (b"7", "text"),
        (b"{", "text"),
        (b'{"a": NaN}', "text"),
        (b'{"a":' * 20_000, "text"),
    ],
)
def test_only_an_object_is_left_as_it_is(line: bytes, key: str) -> None:
    """Other JSON is text: whoever collects lines looks for fields."""
    told: dict[str, Any] = json.loads(json_line(line, JSONFormatter("decode")))

    assert key in told
    assert key == "a" or told["service"] == "decode"
