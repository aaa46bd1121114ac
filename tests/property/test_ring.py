"""Any prompt crosses any ring that is large enough, whatever the order and the delay of releases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from common.errors import LeaseExpired
from common.kv.coverage import Coverage
from common.kv.geometry import KVGeometry
from common.kv.plan import PlannedSpan, SpanGranularity, SpanPlan
from common.kv.ranges import Range
from common.kv.ring import minimum_ring, ring_shares, slot_bytes
from prefill_service.credit import CreditRing, CreditTerms
from tests.property.test_plan import geometries
from tests.support.clock import ManualClock
from tests.support.factories import make_span, plan_of

Step = tuple[PlannedSpan, bool, bool]
"""One layer of one chunk is written: the span it goes to, whether it is its first layer, and its last."""


@st.composite
def plans(draw: st.DrawFn) -> tuple[KVGeometry, SpanPlan, int, int]:
    """Draw a model, a prompt with a first token, and how finely it is cut."""
    geometry = draw(geometries())
    prompt_len = draw(st.integers(1, 30))
    first_token = draw(st.integers(0, prompt_len - 1))
    smallest = draw(st.integers(0, 3000))
    granularity = SpanGranularity(draw(st.integers(1, 9)), smallest, draw(st.integers(smallest + 64, 6000)))
    return geometry, plan_of(geometry, first_token, prompt_len, granularity), first_token, prompt_len


def steps(geometry: KVGeometry, plan: SpanPlan) -> Iterator[Step]:
    """Yield what a writer does: chunk by chunk, layer by layer, span by span."""
    layers = {
        layer: (group.group_index, position)
        for group in geometry.groups
        for position, layer in enumerate(group.layer_indices)
    }
    for chunk in plan.chunks:
        for layer in sorted(layers):
            group_index, position = layers[layer]
            for span in chunk.spans:
                if span.group_index == group_index and span.layers.start <= position < span.layers.stop:
                    yield span, position == span.layers.start, span.completed_by == layer


@given(drawn=plans(), spare=st.integers(0, 5000), random=st.randoms(use_true_random=False))
def test_a_writer_ends_once_everything_told_is_released(
    drawn: tuple[KVGeometry, SpanPlan, int, int], spare: int, random: Random
) -> None:
    """No order of releases starves a group, and no byte of a span that is open or told is given away."""
    geometry, plan, first_token, prompt_len = drawn
    shares = ring_shares(plan, minimum_ring(plan) + spare)
    ring = CreditRing(shares, CreditTerms(0, threading.Event(), ManualClock()))
    slot = Range(4096, 4096 + minimum_ring(plan) + spare)
    coverage = Coverage(geometry.groups, geometry.required(first_token, prompt_len), slot)
    open_spans: dict[int, Range] = {}
    told: list[tuple[int, int, Range]] = []
    sequence = 0

    def release(group_index: int | None = None) -> None:
        """Decode has copied some span, of one group or of any."""
        index = random.choice([i for i, (_, group, _) in enumerate(told) if group_index in (None, group)])
        released, _, _ = told.pop(index)
        coverage.release(released)
        ring.release(released)

    def open_place(span: PlannedSpan) -> int:
        """Ask for room, and release spans of the group until there is; an empty list would be a deadlock."""
        while True:
            try:
                return ring.open(span)
            except LeaseExpired:
                release(span.group_index)

    for span, is_first, is_last in steps(geometry, plan):
        if is_first:
            offset = open_place(span)
            extent = Range(offset, offset + span.length)
            held = [*open_spans.values(), *(other for _, _, other in told)]
            assert not any(extent.overlaps(other) for other in held)
            open_spans[span.group_index] = extent
        if is_last:
            extent = open_spans.pop(span.group_index)
            ring.sealed(sequence, span)
            coverage.place(
                make_span(
                    geometry.groups[span.group_index],
                    span.layers,
                    span.tokens,
                    sequence=sequence,
                    offset=slot.start + extent.start,
                )
            )
            told.append((sequence, span.group_index, extent))
            sequence += 1
        if told and random.random() < 0.3:
            release()
        ring.check_integrity()
        coverage.check_integrity()

    assert coverage.is_complete, coverage.missing()
    assert sequence == plan.num_spans
    while told:
        release()
    assert ring.statistics().held_bytes == 0


@given(drawn=plans(), slot_size=st.integers(0, 60_000))
def test_shares_are_disjoint_large_enough_and_inside_the_slot(
    drawn: tuple[KVGeometry, SpanPlan, int, int], slot_size: int
) -> None:
    """Every group can place its largest span, and no group has more than it can use."""
    _, plan, _, _ = drawn
    slot_size = max(slot_size, minimum_ring(plan))

    shares = ring_shares(plan, slot_size)

    position = 0
    for group_index, share in enumerate(shares):
        lengths = [span.length for span in plan if span.group_index == group_index]
        assert share.start == position
        assert share.start % 64 == 0
        assert max(lengths, default=0) <= len(share) <= sum(lengths)
        position = share.stop
    assert position <= slot_size


@given(drawn=plans(), capacity=st.integers(1, 400).map(lambda blocks: 256 * blocks))
def test_a_leased_slot_can_carry_its_plan(
    drawn: tuple[KVGeometry, SpanPlan, int, int], capacity: int
) -> None:
    """The size that decode asks for fits the slab and is enough for prefill."""
    _, plan, _, _ = drawn
    if minimum_ring(plan) > capacity:
        return

    size = slot_bytes(plan, capacity, 256, can_reuse=True)

    assert -(-size // 256) * 256 <= capacity
    assert size == plan.total_bytes or len(ring_shares(plan, size)) > 0
