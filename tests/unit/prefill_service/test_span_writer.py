"""What a prefill leaves in its slot, and what it seals of it."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import EngineFailed, SpanOutOfRange
from common.kv.coverage import Coverage
from common.kv.digest import DigestKind
from common.kv.geometry import DType
from common.kv.plan import SpanGranularity
from common.kv.ranges import Range
from common.session.messages import TransferMode
from decode_service.cache.storage import Kind
from prefill_service.span_writer import SlotTarget, SpanWriter
from tests.support.clock import ManualClock
from tests.support.factories import make_geometry, plan_of
from tests.support.fakes import PatternEngine, pattern
from tests.support.sessions import make_start, make_totals
from tests.support.span_desk import GRANULARITY, GUARD, HYBRID, SpanDesk


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize(
    ("prompt_len", "first_token"),
    [(1, 0), (7, 0), (8, 0), (9, 0), (21, 0), (21, 8), (21, 11), (21, 20), (16, 15)],
)
def test_every_span_has_the_rows_the_engine_made(
    mode: TransferMode, prompt_len: int, first_token: int
) -> None:
    """In each mode, over chunk edges, for windowed and full groups, and with a prefix left out."""
    desk = SpanDesk(HYBRID, prompt_len, first_token, mode)

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
def test_an_engine_may_leave_out_what_nobody_wants(mode: TransferMode, first_token: int) -> None:
    """It hands over whole chunks, or only the wanted part of each."""
    desk = SpanDesk(HYBRID, 21, first_token, mode)
    engine = PatternEngine(HYBRID)
    engine.writes_wanted_only = True

    desk.prefill(engine)

    for span in desk.sealed:
        desk.assert_span(span)
    assert sum(len(span.layers) * len(span.tokens) for span in desk.sealed) == 5 * 5 + 2 * (21 - first_token)


def test_chunks_before_the_first_token_are_dropped() -> None:
    """An engine that computes a prefix again offers it, and decode has it already."""
    desk = SpanDesk(make_geometry(), 13, first_token=8)
    for layer in range(2):
        desk.write(layer, Range(0, 8))

    assert not desk.sealed
    assert desk.memory.count(GUARD) == len(desk.memory)
    desk.prefill()
    assert {str(span.tokens) for span in desk.sealed} == {"[8, 13)"}


def test_a_layer_too_large_for_a_span_is_split_by_tokens() -> None:
    """Each piece is a span of its own and has its own rows."""
    desk = SpanDesk(make_geometry(), 8, granularity=SpanGranularity(8, 0, 3 * 192))

    desk.prefill()

    assert [len(span.tokens) for span in desk.sealed] == [3, 3, 2, 3, 3, 2]
    for span in desk.sealed:
        desk.assert_span(span)


def test_a_span_names_its_transfer_and_lease() -> None:
    """Transfer, attempt, slot and generation are those of the start."""
    desk = SpanDesk(make_geometry(), 5)

    desk.prefill()

    assert {(one.transfer_id, one.attempt, one.slot_id, one.generation) for one in desk.sealed} == {
        (21, 1, 7, 3)
    }


def test_stream_tells_a_span_with_its_last_layer() -> None:
    """Not before, and not later."""
    desk = SpanDesk(make_geometry(num_layers=3), 5, granularity=SpanGranularity(8, 1500, 8192))
    sealed = []

    for layer in range(3):
        desk.write(layer, Range(0, 5))
        sealed.append([str(span.layers) for span in desk.sealed])

    assert sealed == [[], ["[0, 2)"], ["[0, 2)", "[2, 3)"]]
    assert all(span.sealed_ns == span.written_ns for span in desk.sealed)


def test_deferred_writes_at_once_and_tells_at_the_end() -> None:
    """Export goes on as in stream; only the word comes late."""
    desk = SpanDesk(make_geometry(), 5, mode=TransferMode.DEFERRED)
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
    desk = SpanDesk(make_geometry(), 5, mode=TransferMode.WHOLE)
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
    desk = SpanDesk(make_geometry(num_layers=4), 5, mode=mode, granularity=SpanGranularity(8, 3000, 8192))
    engine = PatternEngine(desk.geometry)
    engine.skipped = {skipped}

    with pytest.raises(EngineFailed, match=f"layer {skipped} "):
        desk.prefill(engine)

    assert not any(skipped in span.layers for span in desk.sealed)


def test_a_chunk_left_out_is_named() -> None:
    """A prompt that was computed in part is no success."""
    desk = SpanDesk(make_geometry(), 13)
    for layer in range(2):
        desk.write(layer, Range(0, 8))

    with pytest.raises(EngineFailed, match=r"\[8, 13\)"):
        desk.writer.finish()


def write_again(desk: SpanDesk) -> None:
    """Write a layer a second time."""
    desk.write(0, Range(0, 8))


def write_backwards(desk: SpanDesk) -> None:
    """Return to a chunk that is over."""
    desk.write(0, Range(8, 13))
    desk.write(1, Range(0, 8))


def write_off_grid(desk: SpanDesk) -> None:
    """Write tokens that are no chunk."""
    desk.write(1, Range(4, 8))


def write_unknown_layer(desk: SpanDesk) -> None:
    """Write a layer that owns no KV."""
    group = desk.geometry.groups[0]
    rows = pattern(group, 0, Kind.KEYS, Range(0, 8))
    desk.writer.write(2, Range(0, 8), rows, rows)


def write_short_rows(desk: SpanDesk) -> None:
    """Write fewer rows than tokens."""
    rows = pattern(desk.geometry.groups[0], 1, Kind.KEYS, Range(0, 7))
    desk.writer.write(1, Range(0, 8), rows, rows)


def write_wide_rows(desk: SpanDesk) -> None:
    """Write rows of another size."""
    rows = np.zeros((8, 3, 33), dtype=np.uint8)
    desk.writer.write(1, Range(0, 8), rows, rows)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize(
    "fault",
    [write_again, write_backwards, write_off_grid, write_unknown_layer, write_short_rows, write_wide_rows],
)
def test_what_breaks_the_engine_s_contract_fails_the_prompt(
    mode: TransferMode, fault: Callable[[SpanDesk], None]
) -> None:
    """Told bytes are never written again, and rows never land where others belong."""
    desk = SpanDesk(make_geometry(), 13, mode=mode)
    desk.write(0, Range(0, 8))
    sealed = [(span, desk.bytes_of(span)) for span in desk.sealed]

    with pytest.raises(EngineFailed):
        fault(desk)
        desk.writer.finish()

    assert all(desk.bytes_of(span) == before for span, before in sealed)
    desk.assert_guarded()


def test_a_slot_too_small_for_the_prompt_is_refused() -> None:
    """It comes from the peer, so it is the transfer's failure and not our bug; nothing was written."""
    plan = plan_of(HYBRID, 0, 21, GRANULARITY)
    memory = memoryview(bytearray(plan.total_bytes - 1))
    target = SlotTarget(make_start(), HYBRID, HYBRID.dtypes, memory, DigestKind.OFF, print)

    with pytest.raises(SpanOutOfRange) as refusal:
        SpanWriter(plan, target, ManualClock())

    assert refusal.value.field == "slot_size"


def make_narrow(mode: TransferMode) -> SpanDesk:
    """Return a session of float16 whose engine computes in float32."""
    geometry = make_geometry(dtype=DType.FLOAT16)
    return SpanDesk(
        geometry,
        11,
        mode=mode,
        granularity=SpanGranularity(8, 0, 4096),
        produced=dict.fromkeys(geometry.dtypes, DType.FLOAT32),
    )


def numbers(tokens: Range, layer_index: int) -> NDArray[np.float32]:
    """Return rows of float32 [tokens, 3, 8], no two numbers alike, that float16 has to round."""
    start = 1000 * layer_index + tokens.start
    rows = np.arange(24 * len(tokens), dtype=np.float32).reshape(-1, 3, 8)
    return (rows + np.float32(24 * start)) / np.float32(3000)


@pytest.mark.parametrize("mode", TransferMode)
def test_numbers_become_those_of_the_session_in_the_copy(mode: TransferMode) -> None:
    """N10: the slot has float16 where the engine computes in float32, whatever the mode."""
    desk = make_narrow(mode)
    for tokens in (Range(0, 8), Range(8, 11)):
        for layer in range(2):
            rows = numbers(tokens, layer)
            desk.writer.write(layer, tokens, rows, -rows)

    desk.writer.finish()

    for span in desk.sealed:
        (layer,) = span.layers
        rows, found = numbers(span.tokens, layer), np.frombuffer(desk.bytes_of(span), np.float16)
        half = rows.astype(np.float16).ravel()
        assert np.array_equal(found[: half.size], half)
        assert np.array_equal(found[half.size : 2 * half.size], -half)
    assert len(desk.sealed) == 4
    desk.assert_guarded()


@pytest.mark.parametrize("mode", TransferMode)
def test_a_number_that_the_session_does_not_have_fails_the_prompt(mode: TransferMode) -> None:
    """N10: it never becomes infinite; its span is not sealed."""
    desk = make_narrow(mode)
    rows = numbers(Range(0, 8), 0)
    rows[3, 1, 2] = 1e6

    with pytest.raises(EngineFailed, match="do not fit float16"):
        desk.writer.write(0, Range(0, 8), rows, rows)
        desk.writer.write(1, Range(0, 8), rows, rows)
        desk.writer.write(0, Range(8, 11), rows[:3], rows[:3])
        desk.writer.write(1, Range(8, 11), rows[:3], rows[:3])
        desk.writer.finish()

    assert desk.sealed == []


def test_rows_are_measured_in_the_type_of_the_engine() -> None:
    """Rows of the session's own type are half as long as an engine of float32 has to bring."""
    desk = make_narrow(TransferMode.STREAM)
    rows = numbers(Range(0, 8), 0).astype(np.float16)

    with pytest.raises(EngineFailed, match="8 rows, 384 bytes, not 8 of 96 bytes"):
        desk.writer.write(0, Range(0, 8), rows, rows)
