"""How a command of `kvspan` ends, tells another program where it serves, and starts one."""

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


def module_command(module: str) -> tuple[str, ...]:
    """Return how to run a module of ours in another process, whatever lies in the working directory.

    Python looks there first, where a folder may have the name of one of our packages; unless that is where
    ours lie.
    """
    root = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)
    return (sys.executable, *(() if os.path.samefile(root, os.curdir) else ("-P",)), "-m", module)
