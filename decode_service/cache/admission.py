"""Which request gets pages and a lane, and goes where; and which one waits.

Theory of operation: a request takes everything it will ever hold in one step, in arrival order, or waits;
nothing is held while waiting, so no order of arrivals can deadlock, and waiting binds to no place. Whenever
something came back, the queue is looked at from its head:

    no place could ever take it any more   failed
    every place that could is busy         waits for these; who is behind it may go elsewhere, never to these
    one that may is being opened           waits for it
    a place takes it now                   granted, if there are pages and a lane; else all behind it wait too

So who waits for pages or a lane is never overtaken, and who waits for the slot of a slow peer is overtaken
only by those who go elsewhere: such a peer holds up those that can go nowhere else, and nobody starves.

    offer --(a place takes it, there is room)--> granted
          --(else)--> queued --(the same)--> granted
          --(queue full)--> QueueFull

Ownership: one per service, event loop only; the only caller of `KVCache.reserve` and `give_back`.
Pure: no clock, no I/O; waiting is the caller's future (`granted` is called back).
Not here: which places there are and which one suits (`Chooser`, `decode_service/prefill/routing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from common.errors import InvariantViolation, KVSpanError, QueueFull
from common.session.messages import TransferMode
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation, ReservationState
from decode_service.request import Route

PlaceT = TypeVar("PlaceT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Wish:
    """Where a request wants to be computed, and how."""

    route: Route
    mode: TransferMode
    avoided: frozenset[Hashable] = frozenset()
    """Places at which it was lost before: chosen only for want of another."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[PlaceT]):
    """Where a request goes now, or what it waits for."""

    place: PlaceT | None
    waits_for: tuple[PlaceT, ...] = ()
    """Any of these would do; none when there is no place yet, but one is about to come."""

    estimates: Mapping[Route, float | None] = field(default_factory=dict)
    """Seconds by route, where routes were compared."""


class Chooser(Protocol[PlaceT]):
    """Knows the places and chooses among them."""

    def choose(self, prompt_len: int, wish: Wish, ahead: Mapping[PlaceT, int]) -> Choice[PlaceT]:
        """Return the place that takes a prompt now, or those it waits for.

        `ahead` are the places that are waited for by those who came before, with prompt tokens of these; none
        of them is chosen.

        Raises: `PromptTooLong` when no place could ever take it, `PeerUnavailable` when none is there that
        could.
        """


@dataclass(frozen=True, slots=True)
class Grant(Generic[PlaceT]):
    """What an admitted request holds, and where it is to begin at once, before anybody else is granted."""

    reservation: Reservation
    choice: Choice[PlaceT]

    @property
    def place(self) -> PlaceT:
        """The place that takes it now."""
        assert self.choice.place is not None
        return self.choice.place


@dataclass(eq=False, slots=True)
class Ticket(Generic[PlaceT]):
    """A request that wants to be admitted; compared by identity."""

    prompt_len: int
    max_new_tokens: int
    wish: Wish
    granted: Callable[[Grant[PlaceT]], None]
    failed: Callable[[KVSpanError], None]
    """Called, once queued, when the last place is gone that could take it."""

    is_first: bool = False
    """Whether it was admitted before and lost it: it waits ahead of all others, and no bound holds for it."""


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


class Admission(Generic[PlaceT]):
    """Hands out reservations in order of arrival."""

    def __init__(
        self,
        cache: KVCache,
        chooser: Chooser[PlaceT],
        num_lanes: int,
        queue_limit: int,
        on_freed: Callable[[Reservation], None] = lambda _: None,
    ) -> None:
        """Start empty; `on_freed` is told of each reservation before its pages come back."""
        self._cache = cache
        self._chooser = chooser
        self._on_freed = on_freed
        self._num_lanes = num_lanes
        self._queue_limit = queue_limit
        self._queue: list[Ticket[PlaceT]] = []
        # Invariant: those that are first, then the others, each in order of arrival.
        self._live: set[Reservation] = set()
        # Invariant: len(_live) <= _num_lanes; holds every reservation that is not FREE.
        self._is_granting = False
        # Invariant: True exactly while `grant_waiting` is on the stack.
        self._num_refused = 0

    def offer(self, ticket: Ticket[PlaceT]) -> None:
        """Grant the ticket now when there is room and a place, and it overtakes nobody; else queue it.

        Raises: `QueueFull`; `PromptTooLong` when it can never fit; `PeerUnavailable` when no place is there
        that could take it. Nothing changed.
        """
        self._cache.check_fits(ticket.prompt_len, ticket.max_new_tokens)
        self._chooser.choose(ticket.prompt_len, ticket.wish, {})
        has_room = ticket.is_first or len(self._queue) < self._queue_limit
        num_first = sum(one.is_first for one in self._queue)
        self._queue.insert(num_first if ticket.is_first else len(self._queue), ticket)
        if not has_room and not self._is_next(ticket):
            self._queue.remove(ticket)
            self._num_refused += 1
            raise QueueFull(self._queue_limit)
        self.grant_waiting()

    def withdraw(self, ticket: Ticket[PlaceT]) -> None:
        """Take a ticket out of the queue; nothing happens when it is not queued."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            self.grant_waiting()

    def grant_waiting(self) -> None:
        """Grant from the queue whom nothing holds up; called whenever something came back or a place changed.

        A grant may come back at once; the call that is on the stack then looks at the queue again, so that
        a mass cancel of a long queue does not recurse.
        """
        if self._is_granting:
            return
        self._is_granting = True
        try:
            while (turn := self._next()) is not None:
                ticket, outcome = turn
                self._queue.remove(ticket)
                if isinstance(outcome, KVSpanError):
                    ticket.failed(outcome)
                else:
                    self._grant(ticket, outcome)
        finally:
            self._is_granting = False

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
            raise InvariantViolation("the turn of a queued request has come, and it was not granted")

    def _next(self) -> tuple[Ticket[PlaceT], Choice[PlaceT] | KVSpanError] | None:
        """Return whose turn it is, and its place or its end; None when everybody has to wait."""
        ahead: dict[PlaceT, int] = {}
        for ticket in self._queue:
            try:
                choice = self._chooser.choose(ticket.prompt_len, ticket.wish, ahead)
            except KVSpanError as error:
                return ticket, error
            if choice.place is not None:
                # Whoever is behind would overtake it for pages or a lane, wherever it went.
                return (ticket, choice) if self._has_room(ticket) else None
            for place in choice.waits_for:
                share = -(-ticket.prompt_len // len(choice.waits_for))
                ahead[place] = ahead.get(place, 0) + share
        return None

    def _is_next(self, ticket: Ticket[PlaceT]) -> bool:
        turn = self._next()
        return turn is not None and turn[0] is ticket

    def _has_room(self, ticket: Ticket[PlaceT]) -> bool:
        has_lane = len(self._live) < self._num_lanes
        return has_lane and self._cache.can_reserve(ticket.prompt_len, ticket.max_new_tokens)

    def _grant(self, ticket: Ticket[PlaceT], choice: Choice[PlaceT]) -> None:
        pages = self._cache.reserve(ticket.prompt_len, ticket.max_new_tokens)
        reservation = Reservation(pages, self._take_back)
        self._live.add(reservation)
        ticket.granted(Grant(reservation, choice))

    def _take_back(self, reservation: Reservation) -> None:
        self._live.remove(reservation)
        self._on_freed(reservation)
        self._cache.give_back(reservation.pages)
        self.grant_waiting()
