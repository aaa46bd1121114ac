"""Turns the text of a flag into a value: each function takes the text and raises ValueError with the rule.

The message is the rule alone ("must be at least 1"); whoever knows the flag puts its name and text in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from common.errors import ConfigError
from common.wire.address import TCPAddress, UnixAddress, parse_address

T = TypeVar("T")
Number = TypeVar("Number", int, float)

_SIZE_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([A-Za-z]*)")


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` to `maximum`, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        return _bounded(value, minimum, maximum)

    return parse


def number(minimum: float, maximum: float | None = None) -> Callable[[str], float]:
    """Return a parser of finite numbers from `minimum` to `maximum`, both included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError("must be finite")
        return _bounded(value, minimum, maximum)

    return parse


def positive(text: str) -> float:
    """Return a finite number above zero."""
    value = number(0)(text)
    if value == 0:
        raise ValueError("must be above 0")
    return value


def size(minimum: int, multiple_of: int = 1) -> Callable[[str], int]:
    """Return a parser of byte counts: digits, alone or with KiB, MiB or GiB."""

    def parse(text: str) -> int:
        found = _SIZE.fullmatch(text.strip())
        unit = None if found is None else _SIZE_UNITS.get(found[2].upper())
        if found is None or unit is None:
            raise ValueError("must be a size such as 4096, 256KiB, 64MiB or 1GiB")
        value = int(found[1]) * unit
        if value < minimum:
            raise ValueError(f"must be at least {size_text(minimum)}")
        if value % multiple_of:
            raise ValueError(f"must be a multiple of {size_text(multiple_of)}")
        return value

    return parse


def size_text(value: int) -> str:
    """Return bytes in the largest unit that divides them: 268435456 is 256MiB."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value and value % unit == 0:
            return f"{value // unit}{name}"
    return str(value)


def rounded_size(num_bytes: int) -> str:
    """Return bytes for people: in the largest unit of which there is at least one, with one decimal."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def choice(values: Iterable[tuple[str, T]]) -> Callable[[str], T]:
    """Return a parser that takes one of the names and gives the value that stands for it."""
    table = dict(values)

    def parse(text: str) -> T:
        if text not in table:
            raise ValueError(f"must be one of {', '.join(table)}")
        return table[text]

    return parse


def listen_address(text: str) -> str:
    """Return an address to listen at: HOST:PORT, where port 0 picks a free one, or unix:PATH."""
    address = _address(text)
    if isinstance(address, UnixAddress) and not address.path.parent.is_dir():
        raise ValueError(f"lies in {address.path.parent}, which is not a directory")
    return text


def target_address(text: str) -> str:
    """Return an address to reach somebody at: HOST:PORT or unix:PATH, which may come into being later."""
    address = _address(text)
    if isinstance(address, TCPAddress) and address.port == 0:
        raise ValueError("must name a port above 0")
    return text


def directory(text: str) -> str:
    """Return the path of a directory that exists."""
    if not Path(text).is_dir():
        raise ValueError("is not a directory")
    return text


def new_file(text: str) -> str:
    """Return the path of a file that exists or can be made."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ValueError(f"lies in {path.parent}, which is not a directory")
    if path.is_dir():
        raise ValueError("is a directory")
    return text


def integers(text: str) -> tuple[int, ...]:
    """Return whole numbers, none below 0, that are separated by commas."""
    return tuple(integer(0)(part) for part in text.split(","))


def _bounded(value: Number, minimum: Number, maximum: Number | None) -> Number:
    if value < minimum:
        raise ValueError(f"must be at least {minimum}")
    if maximum is not None and value > maximum:
        raise ValueError(f"must be at most {maximum}")
    return value


def _address(text: str) -> TCPAddress | UnixAddress:
    try:
        return parse_address("address", text)
    except ConfigError as error:
        raise ValueError(error.problem) from error
