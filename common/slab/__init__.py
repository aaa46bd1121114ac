"""Shared memory of one session: how it is made and handed over, its header, and who may use which bytes."""

from common.slab.allocator import AllocatorStatistics, Slot, SlotAllocator
from common.slab.door import sweep
from common.slab.mapped import MappedSlabs, SlabLimits
from common.slab.segment import SlabSegment

__all__ = [
    "AllocatorStatistics",
    "MappedSlabs",
    "SlabLimits",
    "SlabSegment",
    "Slot",
    "SlotAllocator",
    "sweep",
]
