"""How a command of `kvspan` ends, and how it tells another program where it serves."""

from __future__ import annotations

import os
import sys

EXIT_OK = 0
EXIT_FAILED = 1
"""The work was refused, failed or given up."""

EXIT_USAGE = 2
"""A flag or a setting is wrong; nothing was started."""


class CommandFailed(Exception):
    """The work could not be done; the message is all that the operator is told."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def tell(line: str) -> None:
    """Write a line to stdout at once: the bytes of a path, whatever characters a terminal has."""
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(f"{line}\n"))
    sys.stdout.buffer.flush()
