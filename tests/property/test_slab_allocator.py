"""Slots never overlap, never get lost and never come back under an old name."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import SlabExhausted, StaleGeneration
from common.kv.ranges import Range
from common.slab.allocator import Slot, SlotAllocator

AREA = Range(4096, 4096 + 11 * 64)


class SlotLife(RuleBasedStateMachine):
    """Leases and releases in any order, against a plain list of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(AREA, alignment=64)
        self.held: list[Slot] = []
        self.ended: list[Slot] = []
        self.identities: set[tuple[int, int]] = set()

    @rule(size=st.integers(1, 12 * 64))
    def lease(self, size: int) -> None:
        """A lease is disjoint from all held and has a name that was never used."""
        if not self.allocator.can_lease(size):
            with pytest.raises(SlabExhausted):
                self.allocator.lease(size)
            return
        slot = self.allocator.lease(size)
        assert AREA.contains(slot.extent)
        assert slot.size >= size
        assert not any(slot.extent.overlaps(other.extent) for other in self.held)
        assert (slot.slot_id, slot.generation) not in self.identities
        assert slot.slot_id <= len(self.held)
        self.identities.add((slot.slot_id, slot.generation))
        self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A held slot can be released, in any order."""
        slot = data.draw(st.sampled_from(self.held))
        self.allocator.release(slot)
        self.held.remove(slot)
        self.ended.append(slot)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        """A slot that ended is stale for ever and its release changes nothing."""
        slot = data.draw(st.sampled_from(self.ended))
        before = self.allocator.statistics()
        with pytest.raises(StaleGeneration):
            self.allocator.release(slot)
        assert self.allocator.statistics() == before

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        """Held and free bytes sum to the area, and the parts of the allocator agree."""
        self.allocator.check_integrity()
        statistics = self.allocator.statistics()
        assert statistics.num_leased == len(self.held)
        assert statistics.leased_bytes == sum(slot.size for slot in self.held)
        assert statistics.leased_bytes + statistics.free_bytes == len(AREA)

    def teardown(self) -> None:
        """When everything is back, the whole area is one gap again."""
        for slot in self.held:
            self.allocator.release(slot)
        assert self.allocator.can_lease(self.allocator.capacity_bytes)


SlotLife.TestCase.settings = settings(max_examples=50)
TestSlotLife = SlotLife.TestCase
