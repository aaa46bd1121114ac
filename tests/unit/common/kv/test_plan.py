"""Which spans a prefill makes. A token of one layer has 192 bytes: 3 heads of 8 float32, twice."""

import pytest

from common.kv.plan import PlannedSpan, SpanGranularity, most_steps, plan_spans
from common.kv.ranges import Range
from tests.support.factories import make_geometry, make_hybrid_geometry, plan_of

ONE_LAYER_OF_A_CHUNK = 4 * 192


@pytest.mark.parametrize(
    ("chunk_tokens", "min_span_bytes", "max_span_bytes", "problem"),
    [
        (-1, 0, 640, "chunk_tokens"),
        (4, -1, 640, "min_span_bytes"),
        (4, 641, 640, "min_span_bytes"),
        (4, 0, 63, "max_span_bytes"),
    ],
)
def test_a_granularity_is_refused_when_it_makes_no_sense(
    chunk_tokens: int, min_span_bytes: int, max_span_bytes: int, problem: str
) -> None:
    """A chunk is no shorter than nothing, a span can hold a part's alignment, and the bounds are ordered."""
    with pytest.raises(ValueError, match=problem):
        SpanGranularity(chunk_tokens, min_span_bytes, max_span_bytes)


def test_each_layer_is_a_span_when_nothing_has_to_be_merged() -> None:
    """Chunk after chunk, layer after layer, bytes in the same order."""
    plan = plan_of(make_geometry(num_layers=2), 0, 7, SpanGranularity(4, 0, 4096))

    assert plan.spans == (
        PlannedSpan(0, Range(0, 1), Range(0, 4), 0, 768, completed_by=0),
        PlannedSpan(0, Range(1, 2), Range(0, 4), 768, 768, completed_by=1),
        PlannedSpan(0, Range(0, 1), Range(4, 7), 1536, 576, completed_by=0),
        PlannedSpan(0, Range(1, 2), Range(4, 7), 2112, 576, completed_by=1),
    )
    assert plan.total_bytes == 2688
    assert plan.num_spans == 4


def test_layers_do_not_merge_above_the_maximum() -> None:
    """The maximum wins over the minimum."""
    limit = 3 * ONE_LAYER_OF_A_CHUNK - 64

    plan = plan_of(make_geometry(num_layers=5), 0, 4, SpanGranularity(4, limit, limit))

    assert [len(span.layers) for span in plan] == [2, 2, 1]


def test_the_pad_of_a_piece_counts_towards_the_maximum() -> None:
    """Two tokens of 40 bytes are below 100, and 128 with their pad, so each is a span of its own."""
    geometry = make_geometry(num_layers=1, num_kv_heads=1, head_dim=5)

    plan = plan_of(geometry, 0, 3, SpanGranularity(4, 0, 100))

    assert [(len(span.tokens), span.length) for span in plan] == [(1, 64)] * 3


def test_spans_stay_on_the_absolute_grid_when_the_export_starts_inside_a_chunk() -> None:
    """The first chunk is carried in part and the grid does not move."""
    plan = plan_of(make_geometry(num_layers=1), 6, 11, SpanGranularity(4, 0, 4096))

    assert [span.tokens for span in plan] == [Range(6, 8), Range(8, 11)]
    assert [chunk.chunk for chunk in plan.chunks] == [Range(4, 8), Range(8, 11)]


def test_a_windowed_group_gives_nothing_before_its_window() -> None:
    """A window of 6 on 17 tokens carries 12 to 16; the full group carries all."""
    geometry = make_hybrid_geometry(windows=(6, None))

    plan = plan_of(geometry, 0, 17, SpanGranularity(8, 0, 1 << 20))

    assert [span.tokens for span in plan if span.group_index == 0] == [Range(12, 16), Range(16, 17)]
    assert [span.tokens for span in plan if span.group_index == 1] == [
        Range(0, 8),
        Range(8, 16),
        Range(16, 17),
    ]


def test_groups_interleave_in_the_order_in_which_their_last_layer_ends() -> None:
    """A merged span counts as made when its last layer is done, and each group flushes at its own end."""
    geometry = make_hybrid_geometry(windows=(6, 6, None, 6, 6, None, 6))

    plan = plan_of(geometry, 0, 5, SpanGranularity(8, 3 * 5 * 192, 1 << 20))

    assert [(span.group_index, span.completed_by) for span in plan] == [(0, 3), (1, 5), (0, 6)]


def test_a_plan_begins_with_the_first_chunk_that_carries_something() -> None:
    """That prefill runs those before it is the engine's business."""
    plan = plan_of(make_geometry(window=3), 0, 16, SpanGranularity(8, 0, 4096))

    assert [(chunk.chunk, len(chunk.spans)) for chunk in plan.chunks] == [(Range(8, 16), 2)]


def test_a_prompt_is_one_chunk_when_there_is_no_grid() -> None:
    """An engine that delivers layer by layer has each layer's whole prompt at once."""
    plan = plan_of(make_geometry(num_layers=2), 0, 7, SpanGranularity(0, 0, 4096))

    assert [(span.layers, span.tokens) for span in plan] == [
        (Range(0, 1), Range(0, 7)),
        (Range(1, 2), Range(0, 7)),
    ]


def test_no_span_crosses_layers_that_leave_the_engine_apart() -> None:
    """Layers 0, 1 and 2 to 4 leave together: a span of the first waits for nothing of the second."""
    granularity = SpanGranularity(8, 100_000, 100_000, layer_stops=(2, 5))

    plan = plan_of(make_geometry(num_layers=7), 0, 5, granularity)

    assert [(span.layers, span.completed_by) for span in plan] == [
        (Range(0, 2), 1),
        (Range(2, 5), 4),
        (Range(5, 7), 6),
    ]


def test_layers_of_a_group_are_parted_by_layers_of_the_model() -> None:
    """Model layers 0, 1, 3 are group 0: a stop at layer 2 is between its second and its third."""
    geometry = make_hybrid_geometry(windows=(6, 6, None, 6))

    plan = plan_of(geometry, 0, 5, SpanGranularity(8, 100_000, 100_000, layer_stops=(2,)))

    assert [(span.group_index, span.layers) for span in plan] == [
        (0, Range(0, 2)),
        (1, Range(0, 1)),
        (0, Range(2, 3)),
    ]


def test_a_plan_wants_one_range_for_each_group() -> None:
    """Anything else would mean another model."""
    with pytest.raises(ValueError, match="1 groups, 2 ranges"):
        plan_spans(make_geometry(), (Range(0, 5), Range(0, 5)), SpanGranularity(4, 0, 4096))


@pytest.mark.parametrize("chunk_tokens", [0, 1, 8, 1000])
def test_the_cost_of_a_plan_is_known_before_it_is_made(chunk_tokens: int) -> None:
    """No plan has more chunks, nor a chunk more spans, than the bound says."""
    geometry = make_hybrid_geometry(windows=(6, None, 6))
    granularity = SpanGranularity(chunk_tokens, 0, 64)

    plan = plan_of(geometry, 0, 33, granularity)

    largest = max(len(chunk.template) for chunk in plan.chunks)
    assert len(plan.chunks) + largest <= most_steps(geometry, 33, granularity)


def test_a_plan_is_empty_when_nothing_is_exported() -> None:
    """A transfer that carries nothing has no bytes and no chunks."""
    plan = plan_of(make_geometry(), 9, 9, SpanGranularity(4, 0, 4096))

    assert (plan.chunks, plan.total_bytes, plan.spans) == ((), 0, ())


def test_a_plan_is_refused_when_the_export_starts_behind_the_prompt() -> None:
    """First token cannot be greater than the prompt's length."""
    with pytest.raises(ValueError, match="start <= stop"):
        plan_of(make_geometry(), 10, 9, SpanGranularity(4, 0, 4096))
