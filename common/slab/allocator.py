"""Which bytes of a slab each transfer may use, and whether a slot named by a message still exists.

Theory of operation: slots are variable-size leases, first fit from the low end, each rounded up to the
alignment. Free bytes are a sorted list of gaps that never touch. A slot id carries a generation, +1 each
time the slot becomes free, so that a message about an earlier lease of the same id is stale by number.

    |4096 slot 0 | gap | slot 2 | slot 1 |  gap                  | size of the slab

Ownership: one allocator per slab, in the decode service, used from its event loop only. It decides nothing
about when a slot may be released: that needs the producer's word (`docs/ownership.md`).

Not here: the memory (`segment.py`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from common.errors import InvariantViolation, SlabExhausted, StaleGeneration
from common.kv.ranges import Range

SLOT_ALIGNMENT = 4096
"""Bytes; slots begin and end on memory pages, so that no two transfers share one."""

FIRST_GENERATION = 1
"""Not 0, the value of a field that a peer forgot to set."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A lease of slab bytes; whoever holds it must release it exactly once."""

    slot_id: int
    generation: int
    offset: int
    """First byte, counted from the start of the slab."""

    size: int
    """Bytes; what was asked for, rounded up to the alignment."""

    @property
    def extent(self) -> Range:
        """Return the bytes of the slot, counted from the start of the slab."""
        return Range(self.offset, self.offset + self.size)


@dataclass(frozen=True, slots=True)
class AllocatorStatistics:
    """How the slab is used now."""

    num_leased: int
    """Slots held."""

    leased_bytes: int
    free_bytes: int
    capacity_bytes: int
    """The largest slot that can be leased when nothing is held."""


class SlotAllocator:
    """Leases slots out of the data area of one slab."""

    def __init__(self, data: Range, alignment: int = SLOT_ALIGNMENT) -> None:
        """Start with everything free; bytes of `data` that do not fill the alignment are never used."""
        if alignment < 1:
            raise ValueError(f"alignment must be at least 1, got {alignment}")
        # Up at the start and down at the end: header and tail are nobody's.
        start = -(-data.start // alignment) * alignment
        self._alignment = alignment
        self._area = Range(start, max(start, data.stop // alignment * alignment))
        # Invariant: sorted, not empty, gaps[i].stop < gaps[i + 1].start; gaps and slots tile _area.
        self._gaps: list[Range] = [self._area] if len(self._area) else []
        self._leased: dict[int, Slot] = {}
        # Invariant: ids below len(_generations) are either leased or in the heap _free_ids.
        self._generations: list[int] = []
        # Invariant: _generations[i] = FIRST_GENERATION + releases of id i; it never falls.
        self._free_ids: list[int] = []

    @property
    def capacity_bytes(self) -> int:
        """Return the size of the largest slot that can ever be leased."""
        return len(self._area)

    def can_lease(self, size: int) -> bool:
        """Tell whether `lease(size)` would succeed now."""
        return self._rounded(size) <= self._largest_gap()

    def lease(self, size: int) -> Slot:
        """Take the lowest gap that holds `size` bytes; the caller must release the slot.

        Raises: `SlabExhausted`, with the largest gap, when no gap is large enough; `ValueError` when size
        is below 1. Nothing changed.
        """
        needed = self._rounded(size)
        # The lowest that fits, not the tightest: long-lived slots gather at the low end and the large gap
        # stays whole at the high one, where a prompt that fills the slab would need it.
        index = next((i for i, gap in enumerate(self._gaps) if len(gap) >= needed), None)
        if index is None:
            raise SlabExhausted(size, self._largest_gap())
        gap = self._gaps[index]
        rest = Range(gap.start + needed, gap.stop)
        self._gaps[index : index + 1] = [rest] if len(rest) else []
        slot_id = self._take_id()
        slot = Slot(slot_id, self._generations[slot_id], gap.start, needed)
        self._leased[slot_id] = slot
        return slot

    def release(self, slot: Slot) -> None:
        """Give the bytes back and end this generation of the slot.

        Raises: `StaleGeneration` when the slot was released before; `InvariantViolation` when this
        allocator never made it. Nothing changed.
        """
        if not 0 <= slot.slot_id < len(self._generations):
            raise InvariantViolation(f"slot {slot.slot_id} was never leased here")
        current = self._generations[slot.slot_id]
        # Stale before foreign: after a new lease of the id the slot differs in its bytes too, and that a slot
        # is released twice is what has to be told.
        if slot.generation != current or slot.slot_id not in self._leased:
            raise StaleGeneration(f"generation of slot {slot.slot_id}", current, slot.generation)
        if self._leased[slot.slot_id] != slot:
            raise InvariantViolation(f"{slot} is not the slot leased: {self._leased[slot.slot_id]}")
        del self._leased[slot.slot_id]
        # Here and not at the next lease: from now on every message about this lease is about nothing.
        self._generations[slot.slot_id] += 1
        heapq.heappush(self._free_ids, slot.slot_id)
        self._add_gap(slot.extent)

    def statistics(self) -> AllocatorStatistics:
        """Return how the slab is used now."""
        free_bytes = sum(map(len, self._gaps))
        return AllocatorStatistics(
            num_leased=len(self._leased),
            leased_bytes=len(self._area) - free_bytes,
            free_bytes=free_bytes,
            capacity_bytes=len(self._area),
        )

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when gaps and slots do not tile the area or an id is lost."""
        extents = sorted([*self._gaps, *(slot.extent for slot in self._leased.values())])
        position = self._area.start
        for extent in extents:
            if extent.start != position or not len(extent):
                raise InvariantViolation(f"bytes {extent} follow byte {position}")
            position = extent.stop
        if position != self._area.stop:
            raise InvariantViolation(f"slots and gaps end at {position}, the area at {self._area.stop}")
        if any(a.stop == b.start for a, b in pairwise(self._gaps)):
            raise InvariantViolation("two gaps touch")
        if sorted([*self._leased, *self._free_ids]) != list(range(len(self._generations))):
            raise InvariantViolation(f"ids leased {sorted(self._leased)} and free {sorted(self._free_ids)}")

    def _rounded(self, size: int) -> int:
        if size < 1:
            raise ValueError(f"a slot needs at least 1 byte, got {size}")
        return -(-size // self._alignment) * self._alignment

    def _largest_gap(self) -> int:
        return max(map(len, self._gaps), default=0)

    def _take_id(self) -> int:
        """Return the smallest free id, a new one when all are leased."""
        if self._free_ids:
            return heapq.heappop(self._free_ids)
        self._generations.append(FIRST_GENERATION)
        return len(self._generations) - 1

    def _add_gap(self, freed: Range) -> None:
        """Insert a gap, merged with the neighbours it touches."""
        #     gaps    |a---|        |b--|  |c---|
        #     freed        |xxxxxxxx|                a, freed and b become one: gaps[first:last] = [a, b]
        index = bisect_left(self._gaps, freed)
        first, last = index, index
        if first > 0 and self._gaps[first - 1].stop == freed.start:
            first -= 1
            freed = Range(self._gaps[first].start, freed.stop)
        if last < len(self._gaps) and self._gaps[last].start == freed.stop:
            freed = Range(freed.start, self._gaps[last].stop)
            last += 1
        self._gaps[first:last] = [freed]
