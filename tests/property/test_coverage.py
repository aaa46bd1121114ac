"""Coverage agrees with a set of cells, whatever arrives in whatever order."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.errors import TransferError
from common.kv.coverage import Coverage, Placement
from common.kv.plan import SpanGranularity
from common.kv.ranges import Range
from common.kv.spans import Span
from tests.support.factories import make_hybrid_geometry, make_span, plan_of

GEOMETRY = make_hybrid_geometry(windows=(6, None, 6))
REQUIRED = GEOMETRY.required(2, 9)
SLOT = Range(4096, 4096 + 16384)

Cell = tuple[int, int, int]


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """Spans of mostly right shape, at positions, layers and offsets that may be wrong or taken."""
    group = draw(st.sampled_from(GEOMETRY.groups))
    first_layer, num_layers = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    first_token, num_tokens = draw(st.integers(0, 9)), draw(st.integers(0, 4))
    return make_span(
        group,
        Range(first_layer, first_layer + num_layers),
        Range(first_token, first_token + num_tokens),
        sequence=draw(st.integers(-1, 5)),
        offset=draw(st.integers(62, 322)) * 64,
        digest=draw(st.sampled_from([b"a", b"b"])),
    )


def _cells(span: Span) -> set[Cell]:
    return {(span.group_index, layer, token) for layer in span.layers for token in span.tokens}


def _required_cells() -> set[Cell]:
    return {
        (group.group_index, layer, token)
        for group, tokens in zip(GEOMETRY.groups, REQUIRED, strict=True)
        for layer in range(group.num_layers)
        for token in tokens
    }


@given(st.lists(spans(), max_size=12))
def test_coverage_agrees_with_a_set_of_cells(told: list[Span]) -> None:
    """A new span adds exactly its cells, a duplicate or a refused one adds none and changes nothing."""
    coverage = Coverage(GEOMETRY.groups, REQUIRED, SLOT)
    placed: set[Cell] = set()

    for span in told:
        before = (coverage.missing(), coverage.statistics())
        try:
            placement = coverage.place(span)
        except TransferError:
            assert (coverage.missing(), coverage.statistics()) == before
        else:
            assert _cells(span) <= _required_cells()
            assert (placement is Placement.NEW) == placed.isdisjoint(_cells(span))
            placed |= _cells(span)
        coverage.check_integrity()

    assert sum(group.placed_cells for group in coverage.statistics().groups) == len(placed)
    assert coverage.is_complete == (placed == _required_cells())


@given(st.data(), st.integers(1, 5), st.integers(0, 2000))
def test_a_transfer_completes_whatever_is_reordered_or_repeated(
    data: st.DataObject, chunk_tokens: int, min_span_bytes: int
) -> None:
    """The spans of a plan, shuffled and some told twice, complete coverage with the last missing one."""
    plan = plan_of(GEOMETRY, 2, 9, SpanGranularity(chunk_tokens, min_span_bytes, 2000))
    told = [
        make_span(
            GEOMETRY.groups[span.group_index], span.layers, span.tokens, sequence=i, offset=4096 + span.offset
        )
        for i, span in enumerate(plan)
    ]
    repeated = data.draw(st.lists(st.sampled_from(told), max_size=4))
    coverage = Coverage(GEOMETRY.groups, REQUIRED, SLOT)

    for span in data.draw(st.permutations(told + repeated)):
        assert coverage.is_complete == (coverage.missing() == ())
        coverage.place(replace(span))

    assert coverage.is_complete
    assert coverage.statistics().num_duplicates == len(repeated)


@given(st.data(), st.integers(1, 5))
def test_a_lost_span_is_named_as_missing(data: st.DataObject, chunk_tokens: int) -> None:
    """Without one span coverage stays open, and what is missing is that span's group and tokens."""
    plan = plan_of(GEOMETRY, 2, 9, SpanGranularity(chunk_tokens, 0, 4096))
    lost = data.draw(st.sampled_from(plan.spans))
    coverage = Coverage(GEOMETRY.groups, REQUIRED, SLOT)
    for i, span in enumerate(plan):
        if span != lost:
            group = GEOMETRY.groups[span.group_index]
            coverage.place(make_span(group, span.layers, span.tokens, sequence=i, offset=4096 + span.offset))

    expected = f"group {lost.group_index} layers {lost.completed_by} tokens {lost.tokens}"

    assert not coverage.is_complete
    assert coverage.missing() == (expected,)
