"""Which bytes of a slab each transfer may use."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from common.errors import InvariantViolation, SlabExhausted, StaleGeneration
from common.kv.ranges import Range
from common.slab.allocator import FIRST_GENERATION, SlotAllocator


@pytest.fixture
def allocator() -> Iterator[SlotAllocator]:
    """An allocator over 5 units of 64 bytes behind a header of 128."""
    allocator = SlotAllocator(Range(128, 128 + 320), alignment=64)
    yield allocator
    allocator.check_integrity()


def test_a_slot_is_rounded_up_and_starts_at_the_first_byte_of_the_data_area(allocator: SlotAllocator) -> None:
    """Offsets count from the start of the slab and sizes are whole units."""
    slot = allocator.lease(65)

    assert (slot.slot_id, slot.generation, slot.offset, slot.size) == (0, FIRST_GENERATION, 128, 128)
    assert slot.extent == Range(128, 256)


def test_the_lowest_gap_that_fits_is_taken(allocator: SlotAllocator) -> None:
    """First fit: a small request fills the low gap, a larger one goes behind."""
    low, _ = allocator.lease(64), allocator.lease(64)
    allocator.release(low)

    large = allocator.lease(128)
    small = allocator.lease(64)

    assert (large.offset, small.offset) == (256, 128)


def test_lease_is_refused_when_no_gap_is_large_enough(allocator: SlotAllocator) -> None:
    """Free bytes in two gaps do not make one slot; the error has the largest gap."""
    slots = [allocator.lease(64) for _ in range(5)]
    for slot in slots[::2]:
        allocator.release(slot)
    before = allocator.statistics()

    with pytest.raises(SlabExhausted) as caught:
        allocator.lease(100)

    assert (caught.value.requested, caught.value.free) == (100, 64)
    assert allocator.statistics() == before


@pytest.mark.parametrize(("size", "expected"), [(256, True), (257, False), (1, True)])
def test_can_lease_says_what_lease_would_do(allocator: SlotAllocator, size: int, expected: bool) -> None:
    """Rounding is included in the answer."""
    allocator.lease(64)

    assert allocator.can_lease(size) is expected


@pytest.mark.parametrize("size", [0, -64])
def test_lease_is_refused_when_the_size_is_below_one_byte(allocator: SlotAllocator, size: int) -> None:
    """A transfer that needs no bytes needs no slot."""
    with pytest.raises(ValueError, match="at least 1 byte"):
        allocator.lease(size)


def test_the_generation_grows_when_the_slot_becomes_free(allocator: SlotAllocator) -> None:
    """The same id comes back with the next generation."""
    first = allocator.lease(64)
    allocator.release(first)

    second = allocator.lease(64)

    assert (second.slot_id, second.generation) == (first.slot_id, first.generation + 1)


def test_ids_are_reused_smallest_first(allocator: SlotAllocator) -> None:
    """Ids stay as small as the number of slots ever held at once."""
    slots = [allocator.lease(64) for _ in range(4)]
    for index in (2, 0, 3):
        allocator.release(slots[index])

    assert [allocator.lease(64).slot_id for _ in range(4)] == [0, 2, 3, 4]


def test_release_is_refused_when_the_slot_was_released_before(allocator: SlotAllocator) -> None:
    """A slot ends exactly once, also when its id is leased again."""
    slot = allocator.lease(64)
    allocator.release(slot)
    again = allocator.lease(64)

    with pytest.raises(StaleGeneration) as caught:
        allocator.release(slot)

    assert (caught.value.expected, caught.value.actual) == (again.generation, slot.generation)
    assert allocator.statistics().num_leased == 1


def test_release_is_refused_when_the_slot_is_not_held(allocator: SlotAllocator) -> None:
    """The right generation of a free slot is as wrong as an old one."""
    slot = allocator.lease(64)
    allocator.release(slot)

    with pytest.raises(StaleGeneration):
        allocator.release(replace(slot, generation=slot.generation + 1))


@pytest.mark.parametrize("change", [{"slot_id": 3}, {"slot_id": -1}, {"offset": 192}, {"size": 128}])
def test_release_is_refused_when_the_slot_was_not_made_here(
    allocator: SlotAllocator, change: dict[str, int]
) -> None:
    """A made-up slot is our own mistake and frees nothing."""
    slot = allocator.lease(64)

    with pytest.raises(InvariantViolation):
        allocator.release(replace(slot, **change))

    assert allocator.statistics().num_leased == 1


def test_bytes_that_do_not_fill_the_alignment_are_never_leased() -> None:
    """Slots start and end on the alignment, whatever the area."""
    allocator = SlotAllocator(Range(100, 300), alignment=64)

    assert allocator.lease(allocator.capacity_bytes).extent == Range(128, 256)


def test_nothing_can_be_leased_when_the_area_is_smaller_than_the_alignment() -> None:
    """An area without a whole unit has capacity 0 and no error before the first lease."""
    allocator = SlotAllocator(Range(100, 120), alignment=64)

    assert allocator.capacity_bytes == 0
    assert not allocator.can_lease(1)


def test_an_allocator_is_refused_when_the_alignment_is_not_positive() -> None:
    """The alignment is at least one byte."""
    with pytest.raises(ValueError, match="alignment"):
        SlotAllocator(Range(0, 64), alignment=0)
