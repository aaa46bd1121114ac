"""Checks of single fields that came from a peer.

Theory of operation: a field that no correct peer can send raises `RemoteProtocolError` that names the
field and its value. Only what a message says about itself is checked here; whether it fits the session is
decided by the machines in `common/session`.

A message is converted, compared and quoted on the event loop that all sessions share. So lists and texts are
counted before anything is built of them, and an error quotes only the start of a value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from typing import Generic, TypeVar

from google.protobuf.duration_pb2 import Duration

from common.errors import RemoteProtocolError
from common.excerpt import excerpt
from common.kv.ranges import Range
from kvspan.v1 import geometry_pb2

MAX_INDEX = 2**63 - 1
"""Largest position, offset or length: what a file offset can hold."""

MAX_SECONDS = 315_576_000_000
"""Largest duration that protobuf calls valid: 10 000 years."""

NANOSECONDS = 10**9

MAX_TEXT_CHARS = 1024
"""Longest text: names, ids, digests and what is said to people; a file name has at most 255."""

MAX_CONFIG_CHARS = 256 << 10
"""Longest value of one configuration key or part of a tokenizer; what is longer goes as a digest."""

MAX_CONFIG_FIELDS = 1024
"""Most configuration keys, or parts of a tokenizer; models have about 100 and 9."""

MAX_LAYERS = 4096
"""Most layers; models have about 100."""

MAX_CHOICES = 64
"""Most modes, digests or layouts of an offer; there are three at most today."""

MAX_TOKENS = 1 << 20
"""Most tokens of a prompt; four megabytes of a message hold more only of small ids."""

UNSPECIFIED = 0
"""Number of the value `..._UNSPECIFIED` of every enum."""

Native = TypeVar("Native")
Number = TypeVar("Number", bound=int)


def malformed(field: str, value: object, problem: str) -> RemoteProtocolError:
    """Return the error for a field that no correct peer sends."""
    return RemoteProtocolError(f"{field} is {excerpt(repr(value))}: {excerpt(problem)}")


def require_set(field: str, is_set: bool) -> None:
    """Refuse a message that lacks one of its parts."""
    if not is_set:
        raise malformed(field, None, "must be set")


def require_short(field: str, value: Sized, limit: int, unit: str = "entries") -> None:
    """Refuse a list or a text of more than `limit` entries, characters or bytes, as `unit` says."""
    if len(value) > limit:
        raise malformed(field, f"{len(value)} {unit}", f"must have at most {limit}")


def text(field: str, value: str) -> str:
    """Return a text that must not be empty or longer than MAX_TEXT_CHARS."""
    if not value:
        raise malformed(field, value, "must not be empty")
    require_short(field, value, MAX_TEXT_CHARS, "characters")
    return value


def remark(value: str) -> str:
    """Return a text for people alone, any length of which is allowed: its first MAX_TEXT_CHARS characters."""
    return excerpt(value, MAX_TEXT_CHARS)


def at_least(field: str, value: int, minimum: int) -> int:
    """Return a number that must lie in [minimum, MAX_INDEX]."""
    if not minimum <= value <= MAX_INDEX:
        raise malformed(field, value, f"must be in [{minimum}, {MAX_INDEX}]")
    return value


def index_range(field: str, value: geometry_pb2.IndexRange) -> Range:
    """Return a half-open range."""
    start, stop = value.start, value.stop
    if not start <= stop <= MAX_INDEX:
        raise malformed(field, f"[{start}, {stop})", f"must have start <= stop <= {MAX_INDEX}")
    return Range(start, stop)


def seconds(field: str, value: Duration) -> float:
    """Return a duration that must not be negative, in seconds."""
    if not (0 <= value.seconds <= MAX_SECONDS and 0 <= value.nanos < NANOSECONDS):
        problem = f"must have seconds in [0, {MAX_SECONDS}] and nanos in [0, {NANOSECONDS})"
        raise malformed(field, f"{value.seconds} s {value.nanos} ns", problem)
    return (value.seconds * NANOSECONDS + value.nanos) / NANOSECONDS


def duration(time_s: float) -> Duration:
    """Return a time as a wire duration, to the nearest nanosecond."""
    whole, nanos = divmod(round(time_s * NANOSECONDS), NANOSECONDS)
    return Duration(seconds=whole, nanos=nanos)


class EnumTable(Generic[Native, Number]):
    """The two spellings of one enum. Immutable."""

    __slots__ = ("_natives", "_numbers")

    def __init__(self, pairs: Mapping[Native, Number]) -> None:
        self._numbers = dict(pairs)
        self._natives = {number: native for native, number in pairs.items()}

    def number(self, native: Native) -> Number:
        """Return the wire number of a value."""
        return self._numbers[native]

    def native(self, field: str, number: Number) -> Native:
        """Return the value of a wire number that must be known here."""
        native = self._natives.get(number)
        if native is None:
            raise malformed(field, int(number), f"must be one of {sorted(map(int, self._natives))}")
        return native

    def offered(self, field: str, numbers: Collection[Number]) -> tuple[Native, ...]:
        """Return the known values of an offer, in its order; a newer peer may offer more."""
        require_short(field, numbers, MAX_CHOICES)
        offer = tuple(numbers)
        if UNSPECIFIED in offer:
            raise malformed(field, list(map(int, offer)), "must not hold an unspecified value")
        return tuple(self._natives[number] for number in offer if number in self._natives)
