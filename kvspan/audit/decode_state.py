"""What a decode service holds at one moment of its journal: slots of sessions, pages of reservations.

Theory of operation: bytes of leased slots and pages of live reservations are disjoint extents (rule 1), and
come back only when nothing moves in them (rule 4). Changes yield each rule they break with its problem, and
are made all the same, so that one breach does not hide the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.kv.ranges import Range
from kvspan.audit.extents import Extents
from kvspan.audit.life import Breach
from kvspan.audit.transfers import AuditedTransfer

Breaches = Iterator[tuple[str, str]]
Pages = tuple[tuple[Range, ...], ...]
"""Runs of pages, by group."""


@dataclass(slots=True)
class AuditedSession:
    """One session, until its slab is unmapped."""

    peer: str
    data: Range
    """Bytes of the slab that may be leased."""

    is_closed: bool = False
    slots: dict[int, tuple[int, Range]] = field(default_factory=dict)
    """Generation and extent of the leased slots, by id."""

    transfers: dict[int, AuditedTransfer] = field(default_factory=dict)
    """Those that have started and not drained."""

    highest_transfer: int = 0
    _bytes: Extents = field(default_factory=Extents)
    _generations: dict[int, int] = field(default_factory=dict)
    # Invariant: highest generation of each slot id so far.

    def lease(self, slot: int, generation: int, extent: Range) -> Breaches:
        """Take bytes of the slab."""
        if slot in self.slots:
            yield "R1", f"slot {slot} is leased already"
        if generation <= self._generations.get(slot, 0):
            yield "R4", f"slot {slot} is leased again as generation {generation}"
        if not self.data.contains(extent):
            yield "R1", f"slot {slot} has bytes {extent} outside the slab's {self.data}"
        other = self._bytes.add(extent, str(slot))
        if other is not None:
            yield "R1", f"slot {slot} overlaps slot {other}, which is leased"
        self.slots[slot] = (generation, extent)
        self._generations[slot] = generation

    def free(self, slot: int, generation: int) -> Breaches:
        """Give bytes of the slab back."""
        held = self.slots.pop(slot, None)
        if held is None or held[0] != generation:
            yield "R4", f"slot {slot} of generation {generation} is freed and was not leased"
        if held is not None:
            self._bytes.remove(held[1], str(slot))
        for number, transfer in self.transfers.items():
            if transfer.start.slot == slot:
                yield "R4", f"slot {slot} is freed and transfer {number} has not drained"

    def start(self, transfer: AuditedTransfer) -> Breaches:
        """Take a transfer whose slot must be leased."""
        start = transfer.start
        if self.is_closed:
            yield "R1", "a transfer starts in a closed session"
        if start.transfer <= self.highest_transfer:
            yield "R6", f"transfer id {start.transfer} was used before"
        if self.slots.get(start.slot) != (start.generation, start.extent):
            yield "R1", f"slot {start.slot} with bytes {start.extent} is not leased"
        if any(other.start.slot == start.slot for other in self.transfers.values()):
            yield "R1", f"slot {start.slot} is used by another transfer"
        self.transfers[start.transfer] = transfer
        self.highest_transfer = max(self.highest_transfer, start.transfer)

    def close(self) -> Breaches:
        """Abandon the slab: its producer counts as gone."""
        if self.is_closed:
            yield "R6", "the session was closed before"
        self.is_closed = True
        for transfer in self.transfers.values():
            transfer.end = transfer.end or "lost"


@dataclass(slots=True)
class AuditedReservation:
    """Pages held for one request."""

    pages: Pages
    is_published: bool = False
    transfer: AuditedTransfer | None = None
    """The transfer that may write into the pages."""

    local: str = ""
    """`running` while the engine of the service may write, then its outcome."""

    num_missing: int = 0
    """Required positions that the local engine left out."""

    def take_writer(self) -> Breaches:
        """Check that pages get one writer at a time, and none once they are readable."""
        if self.is_published:
            yield "R2", "pages are written after their publication"
        if self.transfer is not None or self.local == "running":
            yield "R1", "pages have another writer"

    def publish(self) -> Breaches:
        """Make the pages readable."""
        if self.is_published:
            yield "R2", "the reservation was published before"
        self.is_published = True
        if self.transfer is not None:
            for lack in self.transfer.lacks():
                yield "R2", f"transfer {self.transfer.start.transfer} is published: {lack}"
            self.transfer.outcome = self.transfer.outcome or "published"
        elif self.local != "done":
            yield "R2", f"published, and its prefill is {self.local or 'none'}"
        elif self.num_missing:
            yield "R2", f"published, and the local engine left out {self.num_missing} ranges"


class ReservationBook:
    """Live reservations and the pages they hold."""

    def __init__(self, num_pages: tuple[int, ...]) -> None:
        self._num_pages = num_pages
        self._pages = [Extents() for _ in num_pages]
        self._live: dict[int, AuditedReservation] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Names of the live reservations."""
        return tuple(self._live)

    def find(self, number: int) -> AuditedReservation:
        """Return a live reservation; raises `Breach`."""
        if number not in self._live:
            raise Breach("R1", f"reservation {number} is not held")
        return self._live[number]

    def make(self, number: int, pages: Pages) -> Breaches:
        """Take pages."""
        if len(pages) != len(self._num_pages):
            raise ValueError("pages must have one entry per group")
        if number in self._live:
            yield "R1", f"reservation {number} is held already"
        for group, run in _runs(pages):
            if run.stop > self._num_pages[group]:
                yield "R1", f"group {group} has no pages {run}"
            other = self._pages[group].add(run, str(number))
            if other is not None:
                yield "R1", f"pages {run} of group {group} are held by reservation {other}"
        self._live[number] = AuditedReservation(pages)

    def give_back(self, number: int) -> Breaches:
        """Return pages, in which nothing may move any more."""
        reservation = self.find(number)
        if reservation.transfer is not None:
            yield "R4", f"pages are freed and transfer {reservation.transfer.start.transfer} has not drained"
        if reservation.local == "running":
            yield "R4", "pages are freed and the local engine has not ended"
        for group, run in _runs(reservation.pages):
            self._pages[group].remove(run, str(number))
        del self._live[number]

    def forget_transfer(self, transfer: AuditedTransfer) -> None:
        """Note that a transfer has drained."""
        reservation = self._live.get(transfer.start.reservation)
        if reservation is not None and reservation.transfer is transfer:
            reservation.transfer = None


def _runs(pages: Pages) -> Iterator[tuple[int, Range]]:
    return ((group, run) for group, runs in enumerate(pages) for run in runs)
