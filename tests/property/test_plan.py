"""Every plan carries exactly what is required, in order, in bounds and without a byte used twice."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.kv.coverage import Coverage
from common.kv.geometry import DType, KVGeometry, LayerGeometry
from common.kv.plan import SpanGranularity, SpanPlan
from common.kv.ranges import Range
from common.kv.spans import PART_ALIGNMENT, align_up, part_stride
from tests.support.factories import make_span, plan_of

SHAPES = (
    (3, 8, DType.FLOAT32, None),
    (1, 4, DType.FLOAT16, None),
    (2, 8, DType.BFLOAT16, 6),
    (1, 8, DType.FLOAT32, 1),
)


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    """Up to 7 layers of up to 4 shapes, with model layers that own no KV in between."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=7))
    indices = sorted(draw(st.sets(st.integers(0, 12), min_size=len(shapes), max_size=len(shapes))))
    layers = tuple(LayerGeometry(index, *shape) for index, shape in zip(indices, shapes, strict=True))
    return KVGeometry(layers, 11)


@st.composite
def granularities(draw: st.DrawFn) -> SpanGranularity:
    """Chunks of 1 to 9 tokens and bounds from below one token to above a whole chunk."""
    bounds = sorted((draw(st.integers(0, 4000)), draw(st.integers(64, 4000))))
    return SpanGranularity(draw(st.integers(1, 9)), bounds[0], max(bounds[1], PART_ALIGNMENT))


@st.composite
def exports(draw: st.DrawFn) -> tuple[int, int]:
    """First token to export and length of the prompt."""
    prompt_len = draw(st.integers(0, 40))
    return draw(st.integers(0, prompt_len)), prompt_len


@given(geometries(), exports(), granularities())
def test_a_plan_covers_exactly_what_is_required(
    geometry: KVGeometry, export: tuple[int, int], granularity: SpanGranularity
) -> None:
    """Placing every planned span completes the coverage, which refuses any overlap and any excess."""
    plan = plan_of(geometry, *export, granularity)
    coverage = Coverage(geometry.groups, geometry.required(*export), Range(4096, 4096 + plan.total_bytes))

    for sequence, span in enumerate(plan):
        group = geometry.groups[span.group_index]
        told = make_span(group, span.layers, span.tokens, sequence=sequence, offset=4096 + span.offset)
        assert told.length == span.length
        coverage.place(told)

    assert coverage.missing() == ()
    assert coverage.is_complete
    coverage.check_integrity()


@given(geometries(), exports(), granularities())
def test_bytes_of_a_plan_follow_each_other_without_gap(
    geometry: KVGeometry, export: tuple[int, int], granularity: SpanGranularity
) -> None:
    """Offsets are aligned and sequential, and the total is the end of the last span."""
    plan = plan_of(geometry, *export, granularity)
    ends = [0, *(span.offset + span.length for span in plan)]

    assert [span.offset for span in plan] == ends[:-1]
    assert all(span.offset % PART_ALIGNMENT == 0 for span in plan)
    assert (plan.total_bytes, plan.num_spans) == (ends[-1], len(plan.spans))


@given(geometries(), exports(), granularities())
def test_spans_of_a_plan_stay_in_a_chunk_and_below_the_maximum(
    geometry: KVGeometry, export: tuple[int, int], granularity: SpanGranularity
) -> None:
    """Only one token of one layer may be above the maximum."""
    for span in plan_of(geometry, *export, granularity):
        one_token = align_up(2 * geometry.groups[span.group_index].row_bytes)
        is_atom = len(span.tokens) == 1 and len(span.layers) == 1

        assert (
            span.tokens.start // granularity.chunk_tokens
            == (span.tokens.stop - 1) // granularity.chunk_tokens
        )
        assert span.length <= granularity.max_span_bytes or (is_atom and span.length == one_token)


@given(geometries(), exports(), granularities())
def test_spans_of_a_plan_come_in_order_of_completion(
    geometry: KVGeometry, export: tuple[int, int], granularity: SpanGranularity
) -> None:
    """Chunk by chunk, and in a chunk by the model layer after which a span is complete."""
    plan = plan_of(geometry, *export, granularity)
    order = [(span.tokens.start // granularity.chunk_tokens, span.completed_by) for span in plan]

    assert order == sorted(order)
    assert all(
        span.completed_by == geometry.groups[span.group_index].layer_indices[span.layers.stop - 1]
        for span in plan
    )


@given(geometries(), exports(), granularities())
def test_layers_are_merged_as_far_as_the_bounds_ask(
    geometry: KVGeometry, export: tuple[int, int], granularity: SpanGranularity
) -> None:
    """A span below the minimum is its group's last, cannot take one more layer, or is of a split layer."""
    required = geometry.required(*export)

    for span in plan_of(geometry, *export, granularity):
        group = geometry.groups[span.group_index]
        chunk_start = span.tokens.start // granularity.chunk_tokens * granularity.chunk_tokens
        carried = required[span.group_index].intersection(
            Range(chunk_start, chunk_start + granularity.chunk_tokens)
        )
        part = part_stride(group, len(carried))
        if span.tokens != carried:
            assert (len(span.layers), part > granularity.max_span_bytes) == (1, True)
            continue
        is_last = span.layers.stop == group.num_layers
        is_full = span.length + part > granularity.max_span_bytes
        assert span.length >= granularity.min_span_bytes or is_last or is_full
        assert len(span.layers) == 1 or span.length - part < granularity.min_span_bytes


@given(geometries(), exports(), granularities())
def test_chunks_of_a_plan_tile_the_grid(
    geometry: KVGeometry, export: tuple[int, int], granularity: SpanGranularity
) -> None:
    """Every chunk from the one that holds the first wanted position to the end of the prompt."""
    wanted = [tokens for tokens in geometry.required(*export) if tokens]
    plan: SpanPlan = plan_of(geometry, *export, granularity)
    chunks = [chunk.chunk for chunk in plan.chunks]

    assert all(a.stop == b.start for a, b in pairwise(chunks))
    assert all(chunk.start % granularity.chunk_tokens == 0 for chunk in chunks)
    assert (not chunks) == (not wanted)
    assert all(len(chunk) <= granularity.chunk_tokens for chunk in chunks)
    first = min((tokens.start for tokens in wanted), default=0)
    assert not chunks or (chunks[0].start <= first < chunks[0].stop and chunks[-1].stop == export[1])
