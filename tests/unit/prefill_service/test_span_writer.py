"""What a prefill leaves in its slot, and what it seals of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from common.errors import EngineFailed, SpanOutOfRange
from common.kv.coverage import Coverage
from common.kv.digest import DigestKind, digest
from common.kv.geometry import KVGeometry
from common.kv.plan import SpanGranularity, plan_spans
from common.kv.ranges import Range
from common.kv.spans import Span, key_range, value_range
from common.session.messages import GroupTotals, TransferMode
from decode_service.cache.storage import Kind
from prefill_service.span_writer import SlotTarget, SpanWriter
from tests.support.clock import ManualClock
from tests.support.factories import make_geometry, make_hybrid_geometry
from tests.support.fakes import PatternEngine, pattern
from tests.support.sessions import make_start, make_totals

HYBRID = make_hybrid_geometry(windows=(6, 6, None, 6, 6, None, 6), head_dim=5, page_tokens=4)
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
class Desk:
    """A writer, the bytes around its slot, and what it has sealed."""

    geometry: KVGeometry
    prompt_len: int
    first_token: int = 0
    mode: TransferMode = TransferMode.STREAM
    granularity: SpanGranularity = GRANULARITY
    sealed: list[Span] = field(default_factory=list)
    memory: bytearray = field(init=False)
    writer: SpanWriter = field(init=False)
    clock: TickingClock = field(init=False)

    def __post_init__(self) -> None:
        plan = plan_spans(self.geometry, self.first_token, self.prompt_len, self.granularity)
        size = plan.total_bytes
        self.memory = bytearray([GUARD]) * (size + 2 * GUARD_BYTES)
        start = make_start(
            slot_bytes=Range(4096, 4096 + size),
            token_ids=tuple(range(self.prompt_len)),
            first_token=self.first_token,
        )
        start = replace(start, mode=self.mode)
        slot = memoryview(self.memory)[GUARD_BYTES : GUARD_BYTES + size]
        self.clock = TickingClock(START_NS)
        target = SlotTarget(start, slot, DigestKind.XXH3_64, self.sealed.append)
        self.writer = SpanWriter(self.geometry, plan, target, self.clock)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt: its sum is the seed of the pattern."""
        return tuple(range(self.prompt_len))

    def prefill(self, engine: PatternEngine | None = None) -> tuple[GroupTotals, ...]:
        """Run the prompt through the pattern engine, and finish."""
        engine = engine or PatternEngine(self.geometry, self.granularity.chunk_tokens)
        engine.prefill(self.tokens, self.first_token, self.writer, lambda: False)
        return self.writer.finish()

    def write(self, layer_index: int, tokens: Range) -> None:
        """Write the pattern of one layer."""
        group = next(one for one in self.geometry.groups if layer_index in one.layer_indices)
        seed = sum(self.tokens)
        self.writer.write(
            layer_index, tokens, *(pattern(group, layer_index, kind, tokens, seed) for kind in Kind)
        )

    def bytes_of(self, span: Span) -> bytes:
        """Return what the slot holds of a span."""
        start = GUARD_BYTES + span.offset - 4096
        return bytes(self.memory[start : start + span.length])

    def assert_span(self, span: Span) -> None:
        """Check digest, rows and pads of a span against the pattern."""
        group, found = self.geometry.groups[span.group_index], self.bytes_of(span)
        expected = bytearray([GUARD]) * span.length
        for number, layer in enumerate(span.layers):
            for kind, part in ((Kind.KEYS, key_range), (Kind.VALUES, value_range)):
                at = part(group, len(span.tokens), number)
                rows = pattern(group, group.layer_indices[layer], kind, span.tokens, sum(self.tokens))
                expected[at.start : at.stop] = rows.tobytes()
        assert found == bytes(expected)
        assert span.digest == digest(DigestKind.XXH3_64, found)

    def assert_guarded(self) -> None:
        """Check that no byte outside the slot was written."""
        guard = bytes([GUARD]) * GUARD_BYTES
        assert bytes(self.memory[:GUARD_BYTES]) == guard
        assert bytes(self.memory[-GUARD_BYTES:]) == guard


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize(
    ("prompt_len", "first_token"),
    [(1, 0), (7, 0), (8, 0), (9, 0), (21, 0), (21, 8), (21, 11), (21, 20), (16, 15)],
)
def test_every_span_has_the_rows_the_engine_made(
    mode: TransferMode, prompt_len: int, first_token: int
) -> None:
    """In each mode, over chunk edges, for windowed and full groups, and with a prefix left out."""
    desk = Desk(HYBRID, prompt_len, first_token, mode)

    totals = desk.prefill()

    required = HYBRID.required(first_token, prompt_len)
    coverage = Coverage(HYBRID.groups, required, Range(4096, 4096 + len(desk.memory)))
    for span in desk.sealed:
        desk.assert_span(span)
        coverage.place(span)
    desk.assert_guarded()
    assert coverage.is_complete, coverage.missing()
    assert totals == make_totals(desk.sealed, 2)
    assert [span.sequence for span in desk.sealed] == list(range(len(desk.sealed)))


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("first_token", [3, 8, 11])
def test_an_engine_may_leave_out_what_is_not_exported(mode: TransferMode, first_token: int) -> None:
    """It hands over the whole first chunk or only the part from the first token on."""
    desk = Desk(HYBRID, 21, first_token, mode)
    engine = PatternEngine(HYBRID)
    engine.writes_exported_only = True

    desk.prefill(engine)

    for span in desk.sealed:
        desk.assert_span(span)
    assert sum(len(span.layers) * len(span.tokens) for span in desk.sealed) == 5 * 5 + 2 * (21 - first_token)


def test_chunks_before_the_first_token_are_dropped() -> None:
    """An engine that computes a prefix again offers it, and decode has it already."""
    desk = Desk(make_geometry(), 13, first_token=8)
    for layer in range(2):
        desk.write(layer, Range(0, 8))

    assert not desk.sealed
    assert desk.memory.count(GUARD) == len(desk.memory)
    desk.prefill()
    assert {str(span.tokens) for span in desk.sealed} == {"[8, 13)"}


def test_a_layer_too_large_for_a_span_is_split_by_tokens() -> None:
    """Each piece is a span of its own and has its own rows."""
    desk = Desk(make_geometry(), 8, granularity=SpanGranularity(8, 0, 3 * 192))

    desk.prefill()

    assert [len(span.tokens) for span in desk.sealed] == [3, 3, 2, 3, 3, 2]
    for span in desk.sealed:
        desk.assert_span(span)


def test_a_span_names_its_transfer_and_lease() -> None:
    """Transfer, attempt, slot and generation are those of the start."""
    desk = Desk(make_geometry(), 5)

    desk.prefill()

    assert {(one.transfer_id, one.attempt, one.slot_id, one.generation) for one in desk.sealed} == {
        (21, 1, 7, 3)
    }


def test_stream_tells_a_span_with_its_last_layer() -> None:
    """Not before, and not later."""
    desk = Desk(make_geometry(num_layers=3), 5, granularity=SpanGranularity(8, 1500, 8192))
    sealed = []

    for layer in range(3):
        desk.write(layer, Range(0, 5))
        sealed.append([str(span.layers) for span in desk.sealed])

    assert sealed == [[], ["[0, 2)"], ["[0, 2)", "[2, 3)"]]
    assert all(span.sealed_ns == span.written_ns for span in desk.sealed)


def test_deferred_writes_at_once_and_tells_at_the_end() -> None:
    """Export goes on as in stream; only the word comes late."""
    desk = Desk(make_geometry(), 5, mode=TransferMode.DEFERRED)
    desk.write(0, Range(0, 5))
    desk.write(1, Range(0, 5))
    written_ns = desk.clock.now_ns()
    assert not desk.sealed
    assert desk.memory.count(GUARD) < len(desk.memory) // 2

    desk.writer.finish()

    assert all(span.written_ns < written_ns < span.sealed_ns for span in desk.sealed)
    for span in desk.sealed:
        desk.assert_span(span)


def test_whole_writes_nothing_before_the_end() -> None:
    """Not a byte moves while the prompt is computed."""
    desk = Desk(make_geometry(), 5, mode=TransferMode.WHOLE)
    desk.write(0, Range(0, 5))
    desk.write(1, Range(0, 5))
    ended_ns = desk.clock.now_ns()
    assert desk.memory.count(GUARD) == len(desk.memory)

    desk.writer.finish()

    assert all(ended_ns < span.written_ns < span.sealed_ns for span in desk.sealed)
    for span in desk.sealed:
        desk.assert_span(span)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("skipped", range(4))
def test_a_layer_left_out_is_named_and_not_told(mode: TransferMode, skipped: int) -> None:
    """Also in the middle of a span that later layers would end."""
    desk = Desk(make_geometry(num_layers=4), 5, mode=mode, granularity=SpanGranularity(8, 3000, 8192))
    engine = PatternEngine(desk.geometry)
    engine.skipped = {skipped}

    with pytest.raises(EngineFailed, match=f"layer {skipped} "):
        desk.prefill(engine)

    assert not any(skipped in span.layers for span in desk.sealed)


def test_a_chunk_left_out_is_named() -> None:
    """A prompt that was computed in part is no success."""
    desk = Desk(make_geometry(), 13)
    for layer in range(2):
        desk.write(layer, Range(0, 8))

    with pytest.raises(EngineFailed, match=r"\[8, 13\)"):
        desk.writer.finish()


def write_again(desk: Desk) -> None:
    """Write a layer a second time."""
    desk.write(0, Range(0, 8))


def write_backwards(desk: Desk) -> None:
    """Return to a chunk that is over."""
    desk.write(0, Range(8, 13))
    desk.write(1, Range(0, 8))


def write_off_grid(desk: Desk) -> None:
    """Write tokens that are no chunk."""
    desk.write(1, Range(4, 8))


def write_unknown_layer(desk: Desk) -> None:
    """Write a layer that owns no KV."""
    group = desk.geometry.groups[0]
    rows = pattern(group, 0, Kind.KEYS, Range(0, 8))
    desk.writer.write(2, Range(0, 8), rows, rows)


def write_short_rows(desk: Desk) -> None:
    """Write fewer rows than tokens."""
    rows = pattern(desk.geometry.groups[0], 1, Kind.KEYS, Range(0, 7))
    desk.writer.write(1, Range(0, 8), rows, rows)


def write_wide_rows(desk: Desk) -> None:
    """Write rows of another size."""
    rows = np.zeros((8, 3, 33), dtype=np.uint8)
    desk.writer.write(1, Range(0, 8), rows, rows)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize(
    "fault",
    [write_again, write_backwards, write_off_grid, write_unknown_layer, write_short_rows, write_wide_rows],
)
def test_what_breaks_the_engine_s_contract_fails_the_prompt(
    mode: TransferMode, fault: Callable[[Desk], None]
) -> None:
    """Told bytes are never written again, and rows never land where others belong."""
    desk = Desk(make_geometry(), 13, mode=mode)
    desk.write(0, Range(0, 8))
    sealed = [(span, desk.bytes_of(span)) for span in desk.sealed]

    with pytest.raises(EngineFailed):
        fault(desk)
        desk.writer.finish()

    assert all(desk.bytes_of(span) == before for span, before in sealed)
    desk.assert_guarded()


def test_a_slot_too_small_for_the_prompt_is_refused() -> None:
    """It comes from the peer, so it is the transfer's failure and not our bug; nothing was written."""
    plan = plan_spans(HYBRID, 0, 21, GRANULARITY)
    target = SlotTarget(make_start(), memoryview(bytearray(plan.total_bytes - 1)), DigestKind.OFF, print)

    with pytest.raises(SpanOutOfRange) as refusal:
        SpanWriter(HYBRID, plan, target, ManualClock())

    assert refusal.value.field == "slot_size"
