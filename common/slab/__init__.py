"""Shared memory of one session: the file, its header, and who may use which bytes."""

from common.slab.allocator import AllocatorStatistics, Slot, SlotAllocator
from common.slab.segment import SlabSegment, sweep

__all__ = ["AllocatorStatistics", "SlabSegment", "Slot", "SlotAllocator", "sweep"]
