"""What a command of `kvspan` is: a name, its arguments, and a function that returns the exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILED = 1
"""The work was refused, failed or given up."""

EXIT_USAGE = 2
"""A flag or a setting is wrong; nothing was started."""


@dataclass(frozen=True, slots=True)
class Command:
    """One entry of the command line."""

    name: str
    summary: str
    """One line for `kvspan --help`."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code; raises ConfigError for a bad value."""


class CommandFailed(Exception):
    """The work could not be done; the message is all that the operator is told."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(message)
