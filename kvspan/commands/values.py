"""What flags of commands hold beside the settings of services, and how numbers read for people."""

from __future__ import annotations

from typing import Any

import click


class Integers(click.ParamType[tuple[int, ...]]):
    """Whole numbers from `minimum` on, separated by commas."""

    name = "integers"

    def __init__(self, minimum: int) -> None:
        self._each: click.ParamType[int] = click.IntRange(minimum, 2**31 - 1)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers in `value`."""
        if isinstance(value, tuple):
            return value
        return tuple(self._each.convert(part, param, ctx) for part in str(value).split(","))


def rounded_size(num_bytes: int) -> str:
    """Return bytes for people: in the largest unit of which there is at least one, with one decimal."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"
