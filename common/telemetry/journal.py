"""The record that an auditor trusts: one line per change of who may touch which bytes.

Theory of operation: a line is one JSON object. It has a running number, CLOCK_MONOTONIC nanoseconds, the
event, the boot ids of this process and of its peer, and what the event is about; never prompts or tokens.
It ends with a digest over the line before it and itself, so that a line removed, doubled, moved or altered
can be named. The digest finds accidents and edits; it is no defence against who computes it anew:

    {"n":7,"t":…,"event":"span.sealed","boot":…,"peer":…, … ,"chain":"<xxh3 of line 6's chain + this line>"}

A line is one write to the file, so a process that is killed loses at most the line it was writing. A later
life may append to the same file: it ends a torn line and goes on with number and chain. Two processes never
write one file at once.

Ownership: one `Journal` per service, opened and closed by its composition root, used on the event loop
only. A disk that is full ends the journal and not the service: the auditor then sees a life without an end.

Not here: what the lines of a side say (`prefill_service/journaling.py`,
`decode_service/prefill/journaling.py`), what they must obey (`kvspan/audit`).
"""

from __future__ import annotations

import enum
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.errors import ConfigError
from common.kv.digest import DigestKind, digest
from common.kv.ranges import Range
from common.kv.spans import Span
from common.own_file import open_own
from common.telemetry.logging import log_fields

logger = logging.getLogger(__name__)

CHAIN_KIND = DigestKind.XXH3_64
FIRST_CHAIN = bytes(CHAIN_KIND.digest_bytes)
"""What the first line of a file is chained to."""

_TAIL = re.compile(rb'^(\{"n":([0-9]+),.*),"chain":"([0-9a-f]{16})"\}$')
_TAIL_BYTES = 1 << 16
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Event(enum.Enum):
    """What a line tells."""

    SERVICE_STARTED = "service.started"
    SERVICE_STOPPED = "service.stopped"
    """Last line of a life that ended in order; nothing is held."""

    SESSION_OPENED = "session.opened"
    SESSION_CLOSED = "session.closed"
    """The slab is abandoned: what its producer still writes no longer matters."""

    SLAB_UNMAPPED = "slab.unmapped"

    # Decode.
    RESERVATION_MADE = "reservation.made"
    RESERVATION_PUBLISHED = "reservation.published"
    RESERVATION_FREED = "reservation.freed"
    SLOT_LEASED = "slot.leased"
    SLOT_FREED = "slot.freed"
    LOCAL_STARTED = "local.started"
    LOCAL_ENDED = "local.ended"
    """The engine of this process writes no more into the pages."""

    TRANSFER_STARTED = "transfer.started"
    PRODUCER_ENDED = "producer.ended"
    """The peer's terminal message has arrived."""

    TRANSFER_COMPLETED = "transfer.completed"
    TRANSFER_ABORTED = "transfer.aborted"
    TRANSFER_DRAINED = "transfer.drained"
    """No byte of it moves any more; on the prefill side: the engine writes no more."""

    SPAN_SUBMITTED = "span.submitted"
    """Taken for import; bytes may be copied from now on."""

    SPAN_IMPORTED = "span.imported"
    SPAN_REFUSED = "span.refused"
    """Its import has ended badly."""

    SPAN_RELEASED = "span.released"

    # Prefill.
    TRANSFER_ACCEPTED = "transfer.accepted"
    SPAN_SEALED = "span.sealed"
    SPAN_CREDITED = "span.credited"
    """A release has arrived."""

    TRANSFER_ANSWERED = "transfer.answered"
    """The terminal message was sent."""


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """What this life has written."""

    num_lines: int
    num_bytes: int
    is_lost: bool
    """Whether a line could not be written; nothing is written since."""


class Recorder(Protocol):
    """Takes lines."""

    def record(self, event: Event, fields: Mapping[str, Any]) -> None:
        """Write one line; `fields` are JSON values and hold `peer`."""

    def close(self) -> None:
        """Write nothing from now on. Idempotent."""

    def statistics(self) -> JournalStatistics | None:
        """Return what this life has written; None when the journal is off."""


class NullJournal:
    """A journal that is off."""

    __slots__ = ()

    def record(self, event: Event, fields: Mapping[str, Any]) -> None:
        """See `Recorder`; does nothing."""

    def close(self) -> None:
        """See `Recorder`; there is nothing to close."""

    def statistics(self) -> None:
        """Return that there is nothing to count."""


class Journal:
    """The journal of one life of a service."""

    def __init__(self, path: Path, boot_id: str, now_ns: Callable[[], int]) -> None:
        """Open the file, made with mode 0600 when it is not there, and take its end over.

        Raises: `ConfigError` when it cannot be opened, is not a file of this user, is no journal, or is
        written by another process; it is as it was then.
        """
        self._path = path
        self._boot_id = boot_id
        self._now_ns = now_ns
        try:
            self._fd = _open(path)
            try:
                self._number, self._chain = _take_over(self._fd, path)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise ConfigError("journal", path, error.strerror or str(error)) from error
        # Invariant: number and chain of the last whole line of the file.
        self._num_lines = 0
        self._num_bytes = 0
        self._is_lost = False

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(self, event: Event, fields: Mapping[str, Any]) -> None:
        """See `Recorder`; nothing is written after `close`, or after a write that failed."""
        if self._fd < 0:
            return
        head = {"n": self._number + 1, "t": self._now_ns(), "event": event.value, "boot": self._boot_id}
        body = _encode({**head, **fields})[:-1].encode()
        chain = chained(self._chain, body)
        line = b'%s,"chain":"%s"}\n' % (body, chain.hex().encode())
        if self._write(line):
            self._number, self._chain = self._number + 1, chain
            self._num_lines += 1
            self._num_bytes += len(line)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def statistics(self) -> JournalStatistics:
        """Return what this life has written."""
        return JournalStatistics(self._num_lines, self._num_bytes, self._is_lost)

    def _write(self, line: bytes) -> bool:
        problem = "the line was written in part"
        try:
            if os.write(self._fd, line) == len(line):
                return True
        except OSError as error:
            problem = str(error)
        logger.error("journal.lost", extra=log_fields(path=self._path, problem=problem))
        self._is_lost = True
        self.close()
        return False


def open_journal(path: str, boot_id: str, now_ns: Callable[[], int]) -> Journal | NullJournal:
    """Open the journal at `path`; one that is off when the path is empty."""
    return Journal(Path(path), boot_id, now_ns) if path else NullJournal()


def chained(before: bytes, body: bytes) -> bytes:
    """Return the chain of a line: `before` is that of the line before it, `body` what precedes its own."""
    return digest(CHAIN_KIND, before + body)


def split_line(line: bytes) -> tuple[bytes, int, bytes] | None:
    """Return body, number and chain of a line without its line break; None when it is no whole line."""
    found = _TAIL.match(line)
    return None if found is None else (found[1], int(found[2]), bytes.fromhex(found[3].decode()))


def range_field(value: Range) -> list[int]:
    """Return a range as a line holds it."""
    return [value.start, value.stop]


def page_runs(pages: Iterable[int]) -> list[list[int]]:
    """Return pages as runs [first, stop), in the order in which they come."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1][1] = page + 1
        else:
            runs.append([page, page + 1])
    return runs


def span_fields(span: Span) -> dict[str, Any]:
    """Return the description of a span as a line holds it, without its times."""
    return {
        "transfer": span.transfer_id,
        "attempt": span.attempt,
        "slot": span.slot_id,
        "generation": span.generation,
        "sequence": span.sequence,
        "group": span.group_index,
        "layers": range_field(span.layers),
        "tokens": range_field(span.tokens),
        "offset": span.offset,
        "length": span.length,
        "digest": span.digest.hex(),
    }


def _open(path: Path) -> int:
    fd = open_own(path, os.O_RDWR | os.O_APPEND)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError("journal", path, "is written by another process") from error
    except OSError:
        os.close(fd)
        raise
    return fd


def _take_over(fd: int, path: Path) -> tuple[int, bytes]:
    """Return number and chain of the last whole line; end a line that an earlier life left torn."""
    size = os.lseek(fd, 0, os.SEEK_END)
    if not size:
        return 0, FIRST_CHAIN
    wanted = _TAIL_BYTES
    while True:
        start = max(0, size - wanted)
        tail = os.pread(fd, size - start, start)
        lines = tail.split(b"\n")
        # What stands before the first line break of a part may be the end of a line.
        whole = next(filter(None, map(split_line, reversed(lines if not start else lines[1:]))), None)
        if whole is not None or not start:
            break
        wanted *= 2
    if whole is None and b"\n" in tail:
        raise ConfigError("journal", path, "is not empty and not a journal")
    if not tail.endswith(b"\n"):
        os.write(fd, b"\n")
    return (whole[1], whole[2]) if whole is not None else (0, FIRST_CHAIN)
