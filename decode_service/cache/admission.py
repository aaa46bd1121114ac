"""Which request gets pages, lane and slot, and which one waits.

Theory of operation: a request takes everything it will ever hold in one step, in arrival order, or waits;
nothing is held while waiting, so no order of arrivals can deadlock. Who waits for lane or pages is never
overtaken, and who waits for a slot is overtaken only by those that want none of the same session: a slow
peer holds up its own requests and no others, and nobody starves. What can never fit is refused before it is
queued; a full queue refuses.

    offer --(fits)--> granted                 on_free / slot released --> grant from the queue, in order
          --(full)--> queued --(fits)--> granted
          --(queue full)--> QueueFull

Ownership: one per service, event loop only; the only caller of `KVCache.reserve` and `give_back`.
Pure: no clock, no I/O; waiting is the caller's future (`granted` is called back).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.errors import InvariantViolation, KVSpanError, QueueFull
from common.slab.allocator import Slot
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation, ReservationState


class SlotSource(Protocol):
    """Where the slot of a remote prompt comes from: the slab of one session."""

    def can_lease(self, size: int) -> bool:
        """Tell whether `lease` would succeed now."""

    def lease(self, size: int) -> Slot:
        """Take a slot; the transfer that uses it gives it back."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What an admitted request holds."""

    reservation: Reservation
    slot: Slot | None
    """None for a prompt that is computed in this process."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A request that wants to be admitted; compared by identity."""

    prompt_len: int
    max_new_tokens: int
    slots: SlotSource | None
    slot_bytes: int
    granted: Callable[[Grant], None]
    failed: Callable[[KVSpanError], None]


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counts now and since start."""

    num_queued: int
    queue_limit: int
    lanes_used: int
    num_lanes: int
    num_transferring: int
    """Reservations whose call waits for their KV."""

    num_decoding: int
    """Published reservations."""

    num_draining: int
    """Reservations given up before publication that somebody may still write."""

    num_refused: int
    """Turned away because the queue was full, since start."""


class Admission:
    """Hands out reservations in order of arrival."""

    def __init__(
        self,
        cache: KVCache,
        num_lanes: int,
        queue_limit: int,
        on_freed: Callable[[Reservation], None] = lambda _: None,
    ) -> None:
        """Start empty; `on_freed` is told of each reservation before its pages come back."""
        self._cache = cache
        self._on_freed = on_freed
        self._num_lanes = num_lanes
        self._queue_limit = queue_limit
        self._queue: deque[Ticket] = deque()
        self._live: set[Reservation] = set()
        # Invariant: len(_live) <= _num_lanes; holds every reservation that is not FREE.
        self._is_granting = False
        # Invariant: True exactly while `grant_waiting` is on the stack.
        self._num_refused = 0

    def offer(self, ticket: Ticket, *, is_first: bool = False) -> None:
        """Grant the ticket now when it fits and overtakes nobody, else queue it.

        `is_first` is for a request that was granted before and lost it: it waits ahead of all others, and
        the bound of the queue does not hold for it.

        Raises: `QueueFull`, `PromptTooLong` when it can never fit; nothing changed.
        """
        self._cache.check_fits(ticket.prompt_len, ticket.max_new_tokens)
        is_full = len(self._queue) >= self._queue_limit
        if is_first:
            self._queue.appendleft(ticket)
        else:
            self._queue.append(ticket)
        if is_full and not is_first and self._next() is not ticket:
            self._queue.pop()
            self._num_refused += 1
            raise QueueFull(self._queue_limit)
        self.grant_waiting()

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket out of the queue; nothing happens when it is not queued."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            self.grant_waiting()

    def fail_waiting(self, slots: SlotSource, error: KVSpanError) -> None:
        """Fail every queued ticket that wants a slot of a session that has ended."""
        lost = [ticket for ticket in self._queue if ticket.slots is slots]
        self._queue = deque(ticket for ticket in self._queue if ticket.slots is not slots)
        for ticket in lost:
            ticket.failed(error)
        self.grant_waiting()

    def grant_waiting(self) -> None:
        """Grant from the queue whom nothing holds up; called whenever something came back.

        A grant may come back at once; the call that is on the stack then looks at the queue again, so that
        a mass cancel of a long queue does not recurse.
        """
        if self._is_granting:
            return
        self._is_granting = True
        try:
            while (ticket := self._next()) is not None:
                self._queue.remove(ticket)
                self._grant(ticket)
        finally:
            self._is_granting = False

    def num_waiting(self, slots: SlotSource) -> int:
        """Return how many queued tickets want a slot of this session."""
        return sum(ticket.slots is slots for ticket in self._queue)

    def check_room(self, num_before: int) -> None:
        """Raise `QueueFull` for a request that is still to be read when those before it fill lanes and queue.

        `num_before` counts the requests that are read already and will be offered first.
        """
        free_lanes = self._num_lanes - len(self._live)
        if len(self._queue) + num_before >= self._queue_limit + free_lanes:
            self._num_refused += 1
            raise QueueFull(self._queue_limit)

    def statistics(self) -> AdmissionStatistics:
        """Return the counts now."""
        unpublished = [one for one in self._live if one.state is ReservationState.RESERVED]
        wanted = sum(Holder.CLIENT in one.holders for one in unpublished)
        return AdmissionStatistics(
            num_queued=len(self._queue),
            queue_limit=self._queue_limit,
            lanes_used=len(self._live),
            num_lanes=self._num_lanes,
            num_transferring=wanted,
            num_decoding=len(self._live) - len(unpublished),
            num_draining=len(unpublished) - wanted,
            num_refused=self._num_refused,
        )

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when lanes, reservations and the cache's count disagree."""
        self._cache.check_integrity()
        counted = self._cache.statistics().num_reservations
        if counted != len(self._live) or len(self._live) > self._num_lanes:
            raise InvariantViolation(f"{len(self._live)} reservations live, cache counts {counted}")
        if any(one.state is ReservationState.FREE for one in self._live):
            raise InvariantViolation("a free reservation is still listed")
        if self._next() is not None:
            raise InvariantViolation("a queued request fits and was not granted")

    def _next(self) -> Ticket | None:
        """Return whose turn it is and for whom there is room; None when everybody has to wait."""
        held_up: set[SlotSource] = set()
        for ticket in self._queue:
            if ticket.slots in held_up:
                continue
            if ticket.slots is not None and not ticket.slots.can_lease(ticket.slot_bytes):
                held_up.add(ticket.slots)
                continue
            return ticket if self._has_room(ticket) else None
        return None

    def _has_room(self, ticket: Ticket) -> bool:
        has_lane = len(self._live) < self._num_lanes
        return has_lane and self._cache.can_reserve(ticket.prompt_len, ticket.max_new_tokens)

    def _grant(self, ticket: Ticket) -> None:
        slot = ticket.slots.lease(ticket.slot_bytes) if ticket.slots else None
        pages = self._cache.reserve(ticket.prompt_len, ticket.max_new_tokens)
        reservation = Reservation(pages, self._take_back)
        self._live.add(reservation)
        ticket.granted(Grant(reservation, slot))

    def _take_back(self, reservation: Reservation) -> None:
        self._live.remove(reservation)
        self._on_freed(reservation)
        self._cache.give_back(reservation.pages)
        self.grant_waiting()
