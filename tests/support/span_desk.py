"""A span writer before the bytes of its slot, and what it has sealed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from common.kv.digest import DigestKind, digest
from common.kv.geometry import DType, KVGeometry
from common.kv.plan import SpanGranularity
from common.kv.ranges import Range
from common.kv.ring import minimum_ring, ring_shares
from common.kv.spans import Span, key_range, value_range
from common.session.messages import GroupTotals, TransferMode
from decode_service.cache.storage import Kind
from prefill_service.credit import CreditRing, CreditTerms
from prefill_service.span_writer import SlotTarget, SpanWriter
from tests.support.clock import ManualClock
from tests.support.factories import make_hybrid_geometry, paged, plan_of, starts_of
from tests.support.fakes import PatternEngine, all_wanted, pattern
from tests.support.sessions import make_start

HYBRID = paged(make_hybrid_geometry(windows=(6, 6, None, 6, 6, None, 6), head_dim=5))
GRANULARITY = SpanGranularity(chunk_tokens=8, min_span_bytes=1500, max_span_bytes=4096)
GUARD = 0xEE
GUARD_BYTES = 192
START_NS, STEP_NS = 1_000, 7


class TickingClock(ManualClock):
    """Moves on each time it is read, so that no two times are equal."""

    def now_ns(self) -> int:
        """Return the next time."""
        self.advance_ns(STEP_NS)
        return super().now_ns()


@dataclass(slots=True)
class SpanDesk:
    """A writer, the bytes around its slot, and what it has sealed."""

    geometry: KVGeometry
    prompt_len: int
    first_token: int = 0
    mode: TransferMode = TransferMode.STREAM
    granularity: SpanGranularity = GRANULARITY
    is_ring: bool = False
    """Whether the slot is the smallest ring; decode imports what is sealed at once then, unless paused."""

    is_paused: bool = False
    produced: dict[int, DType] = field(default_factory=dict)
    """What the engine delivers, when that is not what the session has."""

    sealed: list[Span] = field(default_factory=list)
    slot: Range = field(init=False)
    memory: bytearray = field(init=False)
    ring: CreditRing | None = field(init=False, default=None)
    writer: SpanWriter = field(init=False)
    clock: TickingClock = field(init=False)

    def __post_init__(self) -> None:
        plan = plan_of(self.geometry, self.first_token, self.prompt_len, self.granularity)
        size = minimum_ring(plan) if self.is_ring else plan.total_bytes
        self.slot, self.clock = Range(4096, 4096 + size), TickingClock(START_NS)
        self.memory = bytearray([GUARD]) * (size + 2 * GUARD_BYTES)
        start = make_start(
            slot_bytes=self.slot,
            token_ids=self.tokens,
            first_tokens=starts_of(self.geometry, self.first_token, self.prompt_len),
        )
        memory = memoryview(self.memory)[GUARD_BYTES : GUARD_BYTES + size]
        produced = self.produced or self.geometry.dtypes
        start = replace(start, mode=self.mode)
        target = SlotTarget(start, self.geometry, produced, memory, DigestKind.XXH3_64, self.hear)
        if self.is_ring:
            assert size < plan.total_bytes
            terms = CreditTerms(0, threading.Event(), ManualClock())
            self.ring = CreditRing(ring_shares(plan, size), terms)
        self.writer = SpanWriter(plan, target, self.clock, self.ring)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt: its sum is the seed of the pattern."""
        return tuple(range(self.prompt_len))

    def prefill(self, engine: PatternEngine | None = None) -> tuple[GroupTotals, ...]:
        """Run the prompt through the pattern engine, and finish."""
        engine = engine or PatternEngine(self.geometry, self.granularity.chunk_tokens)
        wanted = all_wanted(self.geometry, self.prompt_len, self.first_token)
        engine.prefill(list(self.tokens), wanted, self.writer, lambda: False)
        return self.writer.finish()

    def write(self, layer_index: int, tokens: Range) -> None:
        """Write the pattern of one layer."""
        group = next(one for one in self.geometry.groups if layer_index in one.layer_indices)
        seed = sum(self.tokens)
        self.writer.write(
            layer_index, tokens, *(pattern(group, layer_index, kind, tokens, seed) for kind in Kind)
        )

    def hear(self, span: Span) -> None:
        """Take a sealed span; in a ring compare its bytes and give them back."""
        self.sealed.append(span)
        if self.ring is not None and not self.is_paused:
            self.assert_span(span)
            self.ring.release(span.sequence)

    def bytes_of(self, span: Span) -> bytes:
        """Return what the slot holds of a span."""
        start = GUARD_BYTES + span.offset - self.slot.start
        return bytes(self.memory[start : start + span.length])

    def assert_span(self, span: Span) -> None:
        """Check digest, rows and pads of a span; pads of a ring hold what was there before."""
        group, found = self.geometry.groups[span.group_index], self.bytes_of(span)
        expected = bytearray(found) if self.is_ring else bytearray([GUARD]) * span.length
        for number, layer in enumerate(span.layers):
            for kind, part in ((Kind.KEYS, key_range), (Kind.VALUES, value_range)):
                at = part(group, len(span.tokens), number)
                rows = pattern(group, group.layer_indices[layer], kind, span.tokens, sum(self.tokens))
                expected[at.start : at.stop] = rows.tobytes()
        assert found == bytes(expected)
        assert span.digest == digest(DigestKind.XXH3_64, found)

    def assert_guarded(self) -> None:
        """Check that no byte outside the slot was written, and that the books of a ring are right."""
        guard = bytes([GUARD]) * GUARD_BYTES
        assert bytes(self.memory[:GUARD_BYTES]) == guard
        assert bytes(self.memory[-GUARD_BYTES:]) == guard
        if self.ring is not None:
            self.ring.check_integrity()
