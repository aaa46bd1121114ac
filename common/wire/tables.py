"""Messages as tables: which field is which attribute, what it may hold, and one walker for both ways.

Theory of operation: a `Field` reads one value from the wire, told the path under which an error names it,
and writes it back. A `Table` is a message: its fields by their wire names. A field that is itself a message
has to be set, so that a part which is missing never reads as a part full of zeros.

Not here: the messages of every span, which are too many for a walker (`convert.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from common.wire import fields
from common.wire.fields import EnumTable, malformed, require_set, require_short

Wire = TypeVar("Wire", bound=Message)
Native = TypeVar("Native")


def same(value: Any) -> Any:
    """Return a value that is spelled alike on both sides."""
    return value


@dataclass(frozen=True, slots=True)
class Field:
    """How one field is spelled."""

    read: Callable[[str, Any], Any]
    """Takes path and wire value; raises `RemoteProtocolError` with both when no correct peer sends it."""

    write: Callable[[Any], Any] = same

    is_part: bool = False
    """Whether it is a message, which must be set."""

    attribute: str = ""
    """Its name on this side, when that is another."""

    def named(self, attribute: str) -> Field:
        """Return the same field under another name on this side."""
        return replace(self, attribute=attribute)


PLAIN = Field(lambda _, value: value)
"""Anything: whether it fits is for the machines in `common/session` to say."""

COUNT = Field(partial(fields.at_least, minimum=1))
INDEX = Field(partial(fields.at_least, minimum=0))
TEXT = Field(fields.text)
REMARK = Field(lambda _, value: fields.remark(value))
DURATION = Field(fields.seconds, fields.duration, is_part=True)


def one_of(values: EnumTable[Any, Any]) -> Field:
    """Return a field with one known value."""
    return Field(values.native, values.number)


def offer(values: EnumTable[Any, Any]) -> Field:
    """Return a field with values of which a newer peer may know more."""
    return Field(values.offered, lambda natives: list(map(values.number, natives)))


def list_of(one: Field, limit: int) -> Field:
    """Return a field with at most `limit` entries, which are counted before one of them is read."""

    def read(path: str, values: Any) -> tuple[Any, ...]:
        require_short(path, values, limit)
        return tuple(one.read(f"{path}[{index}]", value) for index, value in enumerate(values))

    return Field(read, lambda natives: list(map(one.write, natives)))


class Table(Generic[Wire, Native]):
    """One message. Immutable."""

    __slots__ = ("fields", "native", "wire")

    def __init__(self, wire: Callable[..., Wire], native: Callable[..., Native], **fields: Field) -> None:
        """Take both constructors; `native` raises ValueError when the values make no sense together."""
        self.wire, self.native = wire, native
        self.fields = {name: replace(one, attribute=one.attribute or name) for name, one in fields.items()}

    def read(self, path: str, message: Wire) -> Native:
        """Return what a message says; `path` is where it was found.

        Raises: `RemoteProtocolError` when a part is missing or malformed.
        """
        for name, field in self.fields.items():
            if field.is_part:
                require_set(f"{path}.{name}", message.HasField(name))
        values = {
            field.attribute: field.read(f"{path}.{name}", getattr(message, name))
            for name, field in self.fields.items()
        }
        try:
            return self.native(**values)
        except ValueError as error:
            counted = {name: len(one) if isinstance(one, tuple) else one for name, one in values.items()}
            shown = ", ".join(f"{name} {value}" for name, value in counted.items())
            raise malformed(path, shown, str(error)) from error

    def write(self, native: Native) -> Wire:
        """Return the wire form of a message."""
        return self.wire(
            **{name: field.write(getattr(native, field.attribute)) for name, field in self.fields.items()}
        )

    def as_part(self) -> Field:
        """Return this message as a field of another one."""
        return Field(self.read, self.write, is_part=True)
