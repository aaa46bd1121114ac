"""Reads journals: lines become entries, the chain is checked, several files become one order of events.

Theory of operation: each file is read once, line by line. The chain says what happened to a line: its
number tells removed from repeated lines, its digest tells an altered one. A life ends with
`service.stopped`, or, when its lines just end, it was killed; a `LifeEnded` follows its last line then.
Files are merged by time: all processes of a host read the same clock, so what one side did before the other
comes before it.

Not here: what the events mean (`replay.py`).
"""

from __future__ import annotations

import heapq
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.kv.ranges import Range
from common.telemetry.journal import FIRST_CHAIN, Event, chained, split_line
from kvspan.audit.findings import Findings, Place

LONGEST_LINE = 1 << 24
"""Bytes; far more than a line about all pages of a cache."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line that was read well; the methods raise ValueError when a field is not what it must be."""

    place: Place
    time_ns: int
    event: Event
    boot: str
    fields: Mapping[str, Any] = field(repr=False)

    def text(self, name: str) -> str:
        """Return a field that is text."""
        value = self._field(name)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, is {value!r}")
        return value

    def number(self, name: str) -> int:
        """Return a field that is a whole number."""
        return _number(name, self._field(name))

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a field that is a list of whole numbers."""
        return tuple(_number(name, value) for value in _list(name, self._field(name)))

    def range(self, name: str) -> Range:
        """Return a field that is a range."""
        return _range(name, self._field(name))

    def ranges(self, name: str) -> tuple[Range, ...]:
        """Return a field that is a list of ranges."""
        return tuple(_range(name, value) for value in _list(name, self._field(name)))

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return a field that is a list of pairs of whole numbers."""
        return tuple(_pair(name, value) for value in _list(name, self._field(name)))

    def range_lists(self, name: str) -> tuple[tuple[Range, ...], ...]:
        """Return a field that is a list of lists of ranges."""
        return tuple(
            tuple(_range(name, value) for value in _list(name, part))
            for part in _list(name, self._field(name))
        )

    def _field(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"{name} is missing")
        return self.fields[name]


@dataclass(frozen=True, slots=True)
class LifeEnded:
    """The lines of a life ended without `service.stopped`: it was killed, or runs still."""

    place: Place
    """Its last line."""

    time_ns: int
    boot: str


@dataclass(slots=True)
class _Reader:
    """Reads one file; an iterator of entries in the order of the lines."""

    name: str
    findings: Findings
    number: int = 0
    chain: bytes = FIRST_CHAIN
    # Invariant: number and chain of the last whole line.
    last: Entry | None = None
    torn: Place | None = None
    """A line without an end, until the next line shows whether a kill explains it."""

    is_ended: bool = True
    """Whether the line read last ends with a line break."""

    def read(self, lines: Iterable[bytes]) -> Iterator[Entry | LifeEnded]:
        for line_number, line in enumerate(lines, start=1):
            entry = self._take(Place(self.name, line_number), line)
            if entry is None:
                continue
            if entry.event is Event.SERVICE_STARTED:
                yield from self._end()
            elif self.torn is not None:
                self._blame("CHAIN", self.torn, "the line has no readable end")
            self.torn = None
            self.last = entry
            yield entry
        if self.torn is not None and self.is_ended:
            self._blame("CHAIN", self.torn, "the line has no readable end")
        yield from self._end()

    def _take(self, place: Place, line: bytes) -> Entry | None:
        """Return the entry of a line; None when it is repeated or cannot be read."""
        self.is_ended = line.endswith(b"\n")
        parts = split_line(line.rstrip(b"\n"))
        if parts is None:
            self._not_whole(place, line)
            return None
        body, number, chain = parts
        is_new = self._follow(place, body, number, chain)
        return self._parse(place, body) if is_new else None

    def _not_whole(self, place: Place, line: bytes) -> None:
        """Note a line without an end; only one that a kill cut short can be in order."""
        if self.torn is not None or line.rstrip().endswith(b"}"):
            self._blame("CHAIN", place, "the line has no readable end")
        else:
            self.torn = place

    def _follow(self, place: Place, body: bytes, number: int, chain: bytes) -> bool:
        """Check number and chain against the line before; tell whether the line is a new one."""
        expected = self.number + 1
        if number < expected:
            self._blame("CHAIN", place, f"line number {number} is repeated or moved, {expected} is due")
            return False
        if number > expected:
            self._blame(
                "CHAIN", place, f"line numbers {expected} to {number - 1} are missing before this line"
            )
        elif chained(self.chain, body) != chain:
            self._blame("CHAIN", place, "the line, or the one before it, was altered")
        self.number, self.chain = number, chain
        return True

    def _parse(self, place: Place, body: bytes) -> Entry | None:
        try:
            fields = json.loads(body + b"}")
            return Entry(place, int(fields["t"]), Event(fields["event"]), str(fields["boot"]), fields)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            self._blame("FORMAT", place, f"the line cannot be read: {error}")
            return None

    def _end(self) -> Iterator[LifeEnded]:
        """Tell that the life before this point ended without a word."""
        last, self.last = self.last, None
        if last is not None and last.event is not Event.SERVICE_STOPPED:
            yield LifeEnded(last.place, last.time_ns, last.boot)

    def _blame(self, rule: str, place: Place, problem: str) -> None:
        self.findings.add(rule, place, problem)


def read_entries(name: str, lines: Iterable[bytes], findings: Findings) -> Iterator[Entry | LifeEnded]:
    """Yield the entries of one journal; breaches of the chain go to `findings`."""
    return _Reader(name, findings).read(lines)


def merge_files(paths: Iterable[Path], findings: Findings) -> Iterator[Entry | LifeEnded]:
    """Yield the entries of several journals in the order of time; holds one line of each in memory.

    Raises: `ConfigError` when a file cannot be read.
    """
    return heapq.merge(*(_read_file(path, findings) for path in paths), key=lambda entry: entry.time_ns)


def _read_file(path: Path, findings: Findings) -> Iterator[Entry | LifeEnded]:
    try:
        # Not blocking: a FIFO would wait for a writer for ever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError("FILE", path, "is not a file")
            # What has no line breaks comes in pieces, none of which is a line.
            yield from read_entries(str(path), iter(lambda: file.readline(LONGEST_LINE), b""), findings)
    except OSError as error:
        raise ConfigError("FILE", path, error.strerror or str(error)) from error


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, is {value!r}")
    return value


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, is {value!r}")
    return value


def _pair(name: str, value: object) -> tuple[int, int]:
    parts = _list(name, value)
    if len(parts) != 2:
        raise ValueError(f"{name} must be two numbers, is {value!r}")
    return _number(name, parts[0]), _number(name, parts[1])


def _range(name: str, value: object) -> Range:
    return Range(*_pair(name, value))
