"""Requests before an admission desk: offered, granted, gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import KVSpanError
from common.kv.ranges import Range
from common.slab.allocator import Slot, SlotAllocator
from decode_service.cache.admission import Admission, Grant, SlotSource, Ticket
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation
from tests.support.factories import make_hybrid_geometry

GEOMETRY = make_hybrid_geometry(windows=(6, None), page_tokens=4)
"""A windowed and a full group."""


class Slots:
    """The slab of a session without the session."""

    def __init__(self, slab_bytes: int) -> None:
        self._allocator = SlotAllocator(Range(0, slab_bytes), alignment=64)

    @property
    def num_leased(self) -> int:
        """Slots that somebody holds."""
        return self._allocator.statistics().num_leased

    def can_lease(self, size: int) -> bool:
        """See `SlotSource`."""
        return self._allocator.can_lease(size)

    def lease(self, size: int) -> Slot:
        """See `SlotSource`."""
        return self._allocator.lease(size)

    def release(self, slot: Slot) -> None:
        """Give a slot back; who waits is not told."""
        self._allocator.release(slot)

    def grow(self, slab_bytes: int) -> None:
        """Begin anew with another size."""
        self._allocator = SlotAllocator(Range(0, slab_bytes), alignment=64)


@dataclass(eq=False, slots=True)
class Request:
    """One offered request and what became of it."""

    ticket: Ticket
    slots: Slots | None
    grant: Grant | None = None
    error: KVSpanError | None = None

    @property
    def is_granted(self) -> bool:
        """Whether it was ever granted."""
        return self.grant is not None

    @property
    def reservation(self) -> Reservation:
        """What was granted."""
        assert self.grant is not None
        return self.grant.reservation

    def leave(self) -> None:
        """Give everything back."""
        assert self.grant is not None
        if self.grant.slot is not None:
            assert self.slots is not None
            self.slots.release(self.grant.slot)
        self.grant.reservation.drop(Holder.CLIENT)


@dataclass(slots=True)
class Desk:
    """An admission with its cache and the slab of one session."""

    cache: KVCache
    slots: Slots
    admission: Admission
    granted: list[Request] = field(default_factory=list)
    """In the order in which they were granted."""

    def offer(
        self,
        *,
        prompt_len: int = 3,
        max_new_tokens: int = 1,
        slot_bytes: int | None = 64,
        slots: Slots | None = None,
        drops_at_once: bool = False,
        is_first: bool = False,
    ) -> Request:
        """Offer a request; raises what `Admission.offer` raises."""
        source = None if slot_bytes is None else slots or self.slots

        def granted(grant: Grant) -> None:
            request.grant = grant
            self.granted.append(request)
            if drops_at_once:
                request.leave()

        def failed(error: KVSpanError) -> None:
            request.error = error

        wanted: SlotSource | None = source
        ticket = Ticket(prompt_len, max_new_tokens, wanted, slot_bytes or 0, granted, failed)
        request = Request(ticket, source)
        self.admission.offer(ticket, is_first=is_first)
        return request

    def assert_idle(self) -> None:
        """Check that nothing is held and nobody waits."""
        self.admission.check_integrity()
        statistics = self.admission.statistics()
        assert (statistics.lanes_used, statistics.num_queued) == (0, 0), statistics
        assert all(pool.free == pool.total for pool in self.cache.statistics().groups)
        assert self.slots.num_leased == 0


def make_desk(
    *,
    num_pages: tuple[int, int] = (30, 40),
    num_lanes: int = 7,
    queue_limit: int = 50,
    slab_bytes: int = 4096,
) -> Desk:
    """Return a desk at which nobody waits."""
    cache = KVCache(GEOMETRY, num_pages)
    return Desk(cache, Slots(slab_bytes), Admission(cache, num_lanes, queue_limit))
