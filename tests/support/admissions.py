"""Requests before an admission desk, and places without engines: offered, granted, begun, gone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from common.errors import KVSpanError, PromptTooLong
from common.kv.ranges import Range
from common.session.messages import TransferMode
from common.slab.allocator import Slot, SlotAllocator
from common.telemetry.timeline import Stages, Timeline
from decode_service.cache.admission import Admission, Grant, Ticket, Wish
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation
from decode_service.prefill.peer_problem import LEAVING, PeerProblem
from decode_service.prefill.places import Place
from decode_service.prefill.routing import Router
from decode_service.request import Request, Route
from tests.support.decoding import make_request
from tests.support.factories import make_hybrid_geometry, paged

if TYPE_CHECKING:
    from common.engine.prefill import Logits

GEOMETRY = paged(make_hybrid_geometry(windows=(6, None)))
"""A windowed and a full group."""

TOKEN_BYTES = 64
"""Of slab that a token needs at a place."""


def make_stages(prefill_s: float, exposed_s: float = 0.0) -> Stages:
    """Return stages in which only prefill and exposed transfer took time."""
    prefill, exposed = round(prefill_s * 1e9), round(exposed_s * 1e9)
    return Stages(0, 0, prefill, exposed, 0, 0, prefill + exposed)


class FakePlace:
    """A place for prompts that computes nothing: a slab, a longest prompt, a number of prompts at a time."""

    def __init__(
        self,
        name: str = "peer",
        *,
        num_tokens: int = 64,
        max_prompt_tokens: int = 1000,
        max_running: int = 1000,
        route: Route = Route.REMOTE,
    ) -> None:
        """Be idle; `num_tokens` is the size of the slab."""
        self.name = name
        self.route = route
        self.is_leaving = False
        self._max_prompt_tokens = max_prompt_tokens
        self._max_running = max_running
        self._allocator = SlotAllocator(Range(0, TOKEN_BYTES * num_tokens), alignment=TOKEN_BYTES)
        self._running: list[FakePrefill] = []

    @property
    def num_running(self) -> int:
        """See `Place`."""
        return len(self._running)

    @property
    def backlog_tokens(self) -> int:
        """See `Place`."""
        return sum(prefill.request.prompt_len for prefill in self._running)

    def slot_bytes(self, prompt_len: int, mode: TransferMode) -> int:
        """See `Place`."""
        return TOKEN_BYTES * prompt_len

    def refusal(self, prompt_len: int, mode: TransferMode) -> PromptTooLong | None:
        """See `Place`."""
        if prompt_len > self._max_prompt_tokens:
            return PromptTooLong("prompt tokens", prompt_len, self._max_prompt_tokens)
        needed, capacity = self.slot_bytes(prompt_len, mode), self._allocator.capacity_bytes
        return PromptTooLong("slab bytes", needed, capacity) if needed > capacity else None

    def can_take(self, slot_bytes: int) -> bool:
        """See `Place`."""
        has_room = self.num_running < self._max_running and self._allocator.can_lease(slot_bytes)
        return has_room and not self.is_leaving

    def begin(self, request: Request, reservation: Reservation, timeline: Timeline) -> FakePrefill:
        """See `Place`."""
        assert not self.is_leaving
        assert self.num_running < self._max_running
        slot = self._allocator.lease(self.slot_bytes(request.prompt_len, request.mode))
        prefill = FakePrefill(self, request, slot)
        self._running.append(prefill)
        return prefill

    def end(self, prefill: FakePrefill) -> None:
        """Let go of a prompt; who waits is not told."""
        if prefill in self._running:
            self._running.remove(prefill)
            self._allocator.release(prefill.slot)

    def grow(self, num_tokens: int) -> None:
        """Have a larger slab from now on; who waits is not told."""
        assert not self._running
        self._allocator = SlotAllocator(Range(0, TOKEN_BYTES * num_tokens), alignment=TOKEN_BYTES)


@dataclass(eq=False, slots=True)
class FakePrefill:
    """A prompt that is at a place (`RunningPrefill`) and never comes to its end by itself."""

    place: FakePlace
    request: Request
    slot: Slot

    def abort(self, error: KVSpanError) -> None:
        """Give it up."""
        self.place.end(self)

    async def wait(self) -> None:
        """Nobody waits for it."""
        raise NotImplementedError

    def prove_complete(self) -> Logits:
        """Nobody publishes it."""
        raise NotImplementedError

    def settle(self) -> None:
        """Nobody publishes it."""
        raise NotImplementedError


class FakePeer:
    """A prefill service with a session, or without one."""

    def __init__(self, place: FakePlace | None) -> None:
        self._place = place
        self.is_reopening = False

    @property
    def place(self) -> FakePlace | None:
        """See `Peer`."""
        return None if self._place is None or self._place.is_leaving else self._place

    @property
    def problem(self) -> PeerProblem | None:
        """See `Peer`."""
        return None if self.place else LEAVING

    def join(self, place: FakePlace | None) -> None:
        """Have another session, or none; who waits is not told."""
        self._place = place

    def check_integrity(self) -> None:
        """See `Peer`."""

    def check_idle(self) -> None:
        """See `Peer`."""


@dataclass(eq=False, slots=True)
class Offer:
    """One offered request and what became of it."""

    ticket: Ticket[Place]
    grant: Grant[Place] | None = None
    prefill: FakePrefill | None = None
    error: KVSpanError | None = None

    @property
    def is_granted(self) -> bool:
        """Whether it was ever granted."""
        return self.grant is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it was neither granted nor failed; one that was withdrawn is."""
        return self.grant is None and self.error is None

    @property
    def place(self) -> str:
        """Name of the place where it began; empty when it has not."""
        return self.grant.place.name if self.grant else ""

    @property
    def reservation(self) -> Reservation:
        """What was granted."""
        assert self.grant is not None
        return self.grant.reservation

    def leave(self) -> None:
        """Give everything back: first what the place holds, then pages and lane."""
        assert self.prefill is not None
        self.prefill.place.end(self.prefill)
        self.reservation.drop(Holder.CLIENT)


@dataclass(slots=True)
class Desk:
    """An admission with its cache and its places."""

    cache: KVCache
    peers: tuple[FakePeer, ...]
    local: FakePlace
    router: Router
    admission: Admission[Place]
    granted: list[Offer] = field(default_factory=list)
    """In the order in which they were granted."""

    @property
    def place(self) -> FakePlace:
        """The session with the first prefill service."""
        place = self.peers[0].place
        assert place is not None
        return place

    def offer(
        self,
        prompt_len: int = 3,
        max_new_tokens: int = 1,
        *,
        route: Route = Route.REMOTE,
        avoided: tuple[FakePlace, ...] = (),
        is_first: bool = False,
        drops_at_once: bool = False,
    ) -> Offer:
        """Offer a request; raises what `Admission.offer` raises."""
        request = replace(make_request(), prompt_ids=(7,) * prompt_len, route=route)

        def granted(grant: Grant[Place]) -> None:
            offer.grant = grant
            self.granted.append(offer)
            prefill = grant.place.begin(request, grant.reservation, Timeline(0))
            assert isinstance(prefill, FakePrefill)
            offer.prefill = prefill
            if drops_at_once:
                offer.leave()

        def failed(error: KVSpanError) -> None:
            offer.error = error

        wish = Wish(route, request.mode, frozenset(avoided))
        offer = Offer(Ticket(prompt_len, max_new_tokens, wish, granted, failed, is_first))
        self.admission.offer(offer.ticket)
        return offer

    def measure(self, place: str, stages: Stages) -> None:
        """Have a prompt of ten tokens that was finished at a place; everybody is told."""
        timeline = Timeline(1, place=place)
        timeline.reserved_ns = timeline.source_started_ns = 1
        timeline.source_ended_ns = 1 + stages.prefill
        timeline.published_ns = timeline.first_token_ns = timeline.last_token_ns = timeline.source_ended_ns
        self.router.observe(replace(make_request(), prompt_ids=(7,) * 10), timeline)
        self.admission.grant_waiting()

    def join(self, number: int, place: FakePlace | None) -> None:
        """Have a prefill service come back, or go; everybody is told."""
        self.peers[number].join(place)
        self.admission.grant_waiting()

    def leave(self, number: int = 0) -> None:
        """Have a prefill service take nothing more; everybody is told."""
        place = self.peers[number].place
        assert place is not None
        place.is_leaving = True
        self.admission.grant_waiting()

    def assert_idle(self) -> None:
        """Check that nothing is held and nobody waits."""
        self.admission.check_integrity()
        statistics = self.admission.statistics()
        assert (statistics.lanes_used, statistics.num_queued) == (0, 0), statistics
        assert all(pool.free == pool.total for pool in self.cache.statistics().groups)
        places = [self.local, *(peer.place for peer in self.peers)]
        assert all(place.num_running == 0 for place in places if place)


def fill(place: FakePlace, num_prompts: int, prompt_len: int = 1) -> None:
    """Give a place prompts that stay."""
    request = replace(make_request(), prompt_ids=(7,) * prompt_len)
    for _ in range(num_prompts):
        reservation = Reservation(KVCache(GEOMETRY, (9, 9)).reserve(1, 1), lambda _: None)
        place.begin(request, reservation, Timeline(0))


def make_local(max_prompt_tokens: int = 1000) -> FakePlace:
    """Return this process as a place: no slab, and no end of it."""
    return FakePlace("local", num_tokens=10_000, max_prompt_tokens=max_prompt_tokens, route=Route.LOCAL)


def make_desk(
    *places: FakePlace,
    num_pages: tuple[int, int] = (30, 40),
    num_lanes: int = 7,
    queue_limit: int = 50,
    local: FakePlace | None = None,
) -> Desk:
    """Return a desk at which nobody waits, with a session for each place; with one when none is given."""
    cache, local = KVCache(GEOMETRY, num_pages), local or make_local()
    peers = tuple(FakePeer(place) for place in places or (FakePlace(),))
    router = Router(local, peers)
    return Desk(cache, peers, local, router, Admission(cache, router, num_lanes, queue_limit))
