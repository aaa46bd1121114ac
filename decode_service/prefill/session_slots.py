"""The slab of one session with a prefill service, and who has a lease of its bytes.

Theory of operation: a slot is leased when a request is granted and freed when its transfer has drained, or at
once when that never began. Once the session is lost nothing is leased any more; the memory goes when the last
local copy has ended (rule 4), and leases do not keep it. Until the peer has the slab its door is served here.

Ownership: one per session, which closes it; owns the segment and its allocator. Event loop only.
Not here: whether the peer takes another transfer (`peer_session.py`).
"""

from __future__ import annotations

import asyncio

from common.kv.ranges import Range
from common.kv.spans import Span
from common.slab.allocator import AllocatorStatistics, Slot, SlotAllocator
from common.slab.segment import SlabSegment
from decode_service.prefill.journaling import SessionJournal


class SessionSlots:
    """Leases of one slab; every one is a line of the journal."""

    def __init__(self, slab: SlabSegment, journal: SessionJournal) -> None:
        self._slab = slab
        self._journal = journal
        self._allocator = SlotAllocator(slab.data)
        slab.door.serve(asyncio.get_running_loop())

    @property
    def name(self) -> str:
        """Name of the slab, by which the logs of both services know the session."""
        return self._slab.name

    @property
    def data(self) -> Range:
        """The bytes of the slab that can be leased."""
        return self._slab.data

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the largest slot that can ever be leased."""
        return self._allocator.capacity_bytes

    @property
    def num_leased(self) -> int:
        """Slots in use: of transfers that are not drained, and granted to such as have not begun."""
        return self._allocator.statistics().num_leased

    @property
    def is_unmapped(self) -> bool:
        """Whether the memory is gone."""
        return self._slab.is_closed

    def statistics(self) -> AllocatorStatistics:
        """Return the use of the slab."""
        return self._allocator.statistics()

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when leases and gaps do not tile the slab."""
        self._allocator.check_integrity()

    def can_lease(self, size: int) -> bool:
        """Tell whether there is a gap of `size` bytes."""
        return self._allocator.can_lease(size)

    def lease(self, size: int) -> Slot:
        """Take a slot; whoever has it must `free` it once."""
        slot = self._allocator.lease(size)
        self._journal.slot_leased(slot)
        return slot

    def free(self, slot: Slot) -> None:
        """Give a slot back; nobody may touch its bytes any more."""
        self._journal.slot_freed(slot)
        self._allocator.release(slot)

    def view(self, span: Span) -> memoryview:
        """Return the bytes of a span; the caller releases the view, without which nothing is unmapped."""
        return self._slab.view(span.offset, span.length)

    def shut_door(self) -> None:
        """Hand the slab to nobody any more; its name goes."""
        self._slab.door.close()

    def close(self) -> None:
        """Unmap the slab; no copy out of it may be under way."""
        self._slab.close()
