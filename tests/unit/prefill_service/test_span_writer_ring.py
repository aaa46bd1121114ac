"""What a prefill leaves and seals when its slot is smaller than the prompt's KV."""

import threading
from dataclasses import dataclass, field, replace

import pytest

from common.errors import LeaseExpired
from common.kv.coverage import Coverage
from common.kv.digest import DigestKind, digest
from common.kv.geometry import KVGeometry
from common.kv.plan import SpanGranularity, plan_spans
from common.kv.ranges import Range
from common.kv.ring import minimum_ring, ring_shares
from common.kv.spans import Span, key_range, value_range
from common.session.messages import GroupTotals, TransferMode
from decode_service.cache.storage import Kind
from prefill_service.credit import CreditRing, CreditTerms
from prefill_service.span_writer import SlotTarget, SpanWriter
from tests.support.clock import ManualClock
from tests.support.factories import make_geometry, make_hybrid_geometry
from tests.support.fakes import PatternEngine, pattern
from tests.support.sessions import make_start, make_totals

HYBRID = make_hybrid_geometry(windows=(6, 6, None, 6, 6, None, 6), head_dim=5, page_tokens=4)
GRANULARITY = SpanGranularity(chunk_tokens=8, min_span_bytes=1500, max_span_bytes=4096)
GUARD = 0xEE
GUARD_BYTES = 192
MODES = (TransferMode.STREAM, TransferMode.WHOLE)


@dataclass(slots=True)
class Desk:
    """A writer into the smallest ring; decode imports what is sealed at once, unless it is paused."""

    geometry: KVGeometry
    prompt_len: int
    first_token: int = 0
    mode: TransferMode = TransferMode.STREAM
    is_paused: bool = False
    sealed: list[Span] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    slot: Range = field(init=False)
    memory: bytearray = field(init=False)
    ring: CreditRing = field(init=False)
    writer: SpanWriter = field(init=False)

    def __post_init__(self) -> None:
        plan = plan_spans(self.geometry, self.first_token, self.prompt_len, GRANULARITY)
        size = minimum_ring(plan)
        assert size < plan.total_bytes
        self.slot = Range(4096, 4096 + size)
        self.memory = bytearray([GUARD]) * (size + 2 * GUARD_BYTES)
        start = make_start(slot_bytes=self.slot, token_ids=self.tokens, first_token=self.first_token)
        memory = memoryview(self.memory)[GUARD_BYTES : GUARD_BYTES + size]
        target = SlotTarget(replace(start, mode=self.mode), memory, DigestKind.XXH3_64, self.hear)
        clock = ManualClock()
        self.ring = CreditRing(ring_shares(plan, size), CreditTerms(0, self.stop, clock))
        self.writer = SpanWriter(self.geometry, plan, target, clock, self.ring)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt: its sum is the seed of the pattern."""
        return tuple(range(self.prompt_len))

    def prefill(self) -> tuple[GroupTotals, ...]:
        """Run the prompt through the pattern engine, and finish."""
        engine = PatternEngine(self.geometry, GRANULARITY.chunk_tokens)
        engine.prefill(self.tokens, self.first_token, self.writer, lambda: False)
        return self.writer.finish()

    def hear(self, span: Span) -> None:
        """Take a sealed span: compare its bytes and give them back."""
        self.sealed.append(span)
        if not self.is_paused:
            self.assert_span(span)
            self.ring.release(span.sequence)

    def assert_span(self, span: Span) -> None:
        """Check digest and rows of a span as it lies there now; pads hold what was there before."""
        group, at = self.geometry.groups[span.group_index], GUARD_BYTES + span.offset - self.slot.start
        found = bytes(self.memory[at : at + span.length])
        assert span.digest == digest(DigestKind.XXH3_64, found)
        for number, layer in enumerate(span.layers):
            for kind, part in ((Kind.KEYS, key_range), (Kind.VALUES, value_range)):
                within = part(group, len(span.tokens), number)
                rows = pattern(group, group.layer_indices[layer], kind, span.tokens, sum(self.tokens))
                assert found[within.start : within.stop] == rows.tobytes()

    def assert_guarded(self) -> None:
        """Check that no byte outside the slot was written, and that the ring's books are right."""
        guard = bytes([GUARD]) * GUARD_BYTES
        assert bytes(self.memory[:GUARD_BYTES]) == guard
        assert bytes(self.memory[-GUARD_BYTES:]) == guard
        self.ring.check_integrity()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("prompt_len", "first_token"), [(9, 0), (21, 0), (21, 11), (61, 0)])
def test_a_prompt_crosses_the_smallest_ring(mode: TransferMode, prompt_len: int, first_token: int) -> None:
    """Every span has its rows when it is sealed, and all is covered though bytes are used again."""
    desk = Desk(HYBRID, prompt_len, first_token, mode)
    coverage = Coverage(HYBRID.groups, HYBRID.required(first_token, prompt_len), desk.slot)

    totals = desk.prefill()

    for span in desk.sealed:
        coverage.place(span)
        coverage.release(span.sequence)
    assert coverage.is_complete, coverage.missing()
    assert totals == make_totals(desk.sealed, 2)
    assert [span.sequence for span in desk.sealed] == list(range(len(desk.sealed)))
    assert desk.ring.statistics().held_bytes == 0
    desk.assert_guarded()


def test_whole_through_a_ring_seals_nothing_while_it_computes() -> None:
    """It waits for the end as it does with a slot for everything, and then seals each span when copied."""
    desk = Desk(HYBRID, 21, mode=TransferMode.WHOLE)
    engine = PatternEngine(HYBRID, GRANULARITY.chunk_tokens)

    engine.prefill(desk.tokens, 0, desk.writer, lambda: False)

    assert not desk.sealed
    assert desk.memory.count(GUARD) == len(desk.memory)
    desk.writer.finish()
    assert desk.sealed


@pytest.mark.parametrize("mode", MODES)
def test_a_span_that_gets_no_credit_writes_no_byte(mode: TransferMode) -> None:
    """Rule 5: what is sealed and not released stays as it was sealed, and the prompt fails."""
    desk = Desk(make_geometry(), 21, mode=mode, is_paused=True)

    with pytest.raises(LeaseExpired, match=r"no credit for 1536 bytes of group 0 .*1 spans sealed"):
        desk.prefill()

    (span,) = desk.sealed
    desk.assert_span(span)
    desk.assert_guarded()
