"""Reads a command line without running the command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


def parse_line(command: click.Command, line: Sequence[str]) -> dict[str, Any]:
    """Return what a line gives to the command that it names, in `command` or below it."""
    context = command.make_context(command.name, list(line))
    if not isinstance(command, click.Group):
        return context.params
    _, below, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    assert below is not None
    return parse_line(below, rest)
