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
    try:
        sys.stdout.buffer.write(os.fsencode(f"{line}\n"))
        sys.stdout.buffer.flush()
    except OSError as error:
        raise output_failure(error, sys.stdout.fileno()) from error


def output_failure(error: OSError, number: int) -> Exception:
    """Return what to raise when writing to a standard stream failed; all further output goes nowhere.

    Else the interpreter would complain once more, and change the exit code, when it writes what is left.
    """
    lead_nowhere(number)
    if isinstance(error, BrokenPipeError):
        return BrokenPipeError(error.errno, error.strerror)
    return CommandFailed(f"writing to stdout failed: {error.strerror}")


def lead_nowhere(number: int) -> None:
    """Make a file descriptor one to which anybody may write."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def module_command(module: str) -> tuple[str, ...]:
    """Return how to run a module of ours in another process, whatever lies in the working directory.

    Python looks there first, where a folder may have the name of one of our packages; unless that is where
    ours lie.
    """
    root = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)
    return (sys.executable, *(() if os.path.samefile(root, os.curdir) else ("-P",)), "-m", module)
