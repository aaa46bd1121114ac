"""Slots smaller than the KV that crosses them: how small, and whose which part is."""

import pytest

from common.errors import PromptTooLong, SpanOutOfRange
from common.kv.plan import SpanGranularity, SpanPlan
from common.kv.ranges import Range
from common.kv.ring import minimum_ring, ring_shares, slot_bytes
from tests.support.factories import make_geometry, make_hybrid_geometry, plan_of

GRANULARITY = SpanGranularity(chunk_tokens=8, min_span_bytes=0, max_span_bytes=4096)

TOKEN_BYTES = {0: 2 * 3 * 8 * 4, 1: 2 * 3 * 16 * 4}
"""Keys and values of one token in one layer of each group of HYBRID: 192 and 384."""

HYBRID = plan_of(make_hybrid_geometry(windows=(6, 6, None)), 0, 21, GRANULARITY)
"""Chunks of 8, 8 and 5 tokens; the windowed group carries 5 of the last, twice; the other all 21, once."""

RING_BYTES, FULL_BYTES = 2 * 5 * TOKEN_BYTES[0], 21 * TOKEN_BYTES[1]
LARGEST = (5 * TOKEN_BYTES[0], 8 * TOKEN_BYTES[1])


def make_plan(prompt_len: int = 21) -> SpanPlan:
    """Return the plan of a model with one group: two spans in each chunk, 192 bytes a token."""
    return plan_of(make_geometry(), 0, prompt_len, GRANULARITY)


def test_the_smallest_window_holds_the_largest_span_of_each_group() -> None:
    """One span of each group may be open at one time."""
    assert minimum_ring(HYBRID) == sum(LARGEST)
    assert minimum_ring(make_plan()) == 8 * 192
    assert minimum_ring(make_plan(5)) == 5 * 192


def test_a_plan_without_spans_needs_no_window() -> None:
    """A prompt of which decode holds everything."""
    plan = plan_of(make_geometry(), 5, 5, GRANULARITY)

    assert minimum_ring(plan) == 0
    assert ring_shares(plan, 640) == ()


def test_the_smallest_window_is_cut_into_the_largest_spans() -> None:
    """Nothing is left to give."""
    first, whole = LARGEST[0], sum(LARGEST)

    assert ring_shares(HYBRID, whole) == (Range(0, first), Range(first, whole))


def test_what_is_left_goes_where_more_bytes_cross() -> None:
    """In proportion to the bytes beyond the largest span, rounded down to 64."""
    spare = 1024
    beyond = [RING_BYTES - LARGEST[0], FULL_BYTES - LARGEST[1]]
    extra = [spare * one // sum(beyond) // 64 * 64 for one in beyond]

    windowed, full = ring_shares(HYBRID, sum(LARGEST) + spare)

    assert [len(windowed), len(full)] == [LARGEST[0] + extra[0], LARGEST[1] + extra[1]]
    assert extra[1] > extra[0] > 0
    assert windowed.stop == full.start


def test_a_window_of_the_whole_plan_gives_each_group_its_bytes() -> None:
    """More could not be used, so none is given."""
    shares = ring_shares(HYBRID, HYBRID.total_bytes + 4096)

    assert [len(share) for share in shares] == [RING_BYTES, FULL_BYTES]


def test_a_group_without_spans_has_an_empty_share() -> None:
    """A window of one token asks for nothing that lies before it."""
    plan = plan_of(make_hybrid_geometry(windows=(1, None)), 0, 21, GRANULARITY)

    assert ring_shares(plan, 6000)[0] == Range(0, 0)


def test_a_slot_below_the_smallest_window_is_refused_with_the_numbers() -> None:
    """It comes from the peer, so it is the transfer's failure."""
    with pytest.raises(SpanOutOfRange, match=f"slot_size is 4031, allowed at least {sum(LARGEST)}"):
        ring_shares(HYBRID, sum(LARGEST) - 1)


@pytest.mark.parametrize("can_reuse", [True, False])
def test_a_plan_that_can_be_leased_is_leased_whole(can_reuse: bool) -> None:
    """A byte that is used once never waits."""
    total = 21 * 2 * 192

    assert slot_bytes(make_plan(), total, 128, can_reuse=can_reuse) == total


def test_a_larger_plan_takes_half_of_the_slab() -> None:
    """On the alignment of slots and not above the half, so that two fit."""
    assert slot_bytes(make_plan(), 7000, 128, can_reuse=True) == 3456


def test_a_larger_plan_takes_what_it_needs_when_half_is_too_little() -> None:
    """One at a time then."""
    assert slot_bytes(make_plan(), 1600, 128, can_reuse=True) == 8 * 192


@pytest.mark.parametrize(("can_reuse", "needed"), [(True, 8 * 192), (False, 21 * 2 * 192)])
def test_what_can_never_fit_is_refused_with_the_numbers(can_reuse: bool, needed: int) -> None:
    """Without reuse the whole plan must fit; with it, its largest spans."""
    with pytest.raises(PromptTooLong) as refusal:
        slot_bytes(make_plan(), 1535, 128, can_reuse=can_reuse)

    assert (refusal.value.limit_name, refusal.value.needed, refusal.value.limit) == (
        "slab bytes",
        needed,
        1535,
    )
