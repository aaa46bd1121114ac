"""Which spans have been placed against what is required."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from common.errors import InvariantViolation, SpanOutOfRange, SpanOverlap
from common.kv.coverage import Coverage, Placement
from common.kv.geometry import GroupGeometry
from common.kv.ranges import Range
from common.kv.spans import Span
from tests.support.factories import make_hybrid_geometry, make_span

GROUPS = make_hybrid_geometry(windows=(6, None, 6, 6)).groups
WINDOWED, FULL = GROUPS
REQUIRED = (Range(4, 9), Range(2, 9))
SLOT = Range(4096, 4096 + 8192)
LAYERS = Range(0, 2)
TOKENS = Range(4, 7)


@pytest.fixture
def coverage() -> Iterator[Coverage]:
    """An empty coverage: three windowed layers need [4, 9), one full layer needs [2, 9)."""
    coverage = Coverage(GROUPS, REQUIRED, SLOT)
    yield coverage
    coverage.check_integrity()


def _span(group: GroupGeometry = WINDOWED, layers: Range = LAYERS, tokens: Range = TOKENS) -> Span:
    return make_span(group, layers, tokens, sequence=5, offset=4096, digest=b"d")


def test_coverage_is_complete_when_every_layer_has_every_required_position(coverage: Coverage) -> None:
    """Completeness needs all groups, all layers and all positions, in any order."""
    coverage.place(make_span(FULL, Range(0, 1), REQUIRED[1], sequence=0, offset=4096))
    coverage.place(make_span(WINDOWED, Range(1, 3), REQUIRED[0], sequence=2, offset=8192))
    was_complete = coverage.is_complete

    coverage.place(make_span(WINDOWED, Range(0, 1), REQUIRED[0], sequence=1, offset=10240))

    assert (was_complete, coverage.is_complete) == (False, True)
    assert coverage.missing() == ()


def test_coverage_is_complete_when_nothing_is_required() -> None:
    """A transfer with everything held already ends without a span."""
    assert Coverage(GROUPS, (Range(9, 9), Range(9, 9)), SLOT).is_complete


def test_coverage_needs_one_required_range_for_each_group() -> None:
    """A group without a required range is a mistake of the caller."""
    with pytest.raises(ValueError, match="2 groups"):
        Coverage(GROUPS, (Range(0, 4),), SLOT)


def test_missing_names_group_model_layers_and_tokens(coverage: Coverage) -> None:
    """Layers are the model's numbers, and layers with the same gap share a line."""
    coverage.place(make_span(WINDOWED, Range(1, 3), Range(5, 9)))

    assert coverage.missing() == (
        "group 0 layers 0 tokens [4, 9)",
        "group 0 layers 2-3 tokens [4, 5)",
        "group 1 layers 1 tokens [2, 9)",
    )


def test_a_duplicate_is_counted_when_the_descriptor_is_the_same(coverage: Coverage) -> None:
    """An exact repetition changes nothing but a counter, under whatever sequence number it comes."""
    assert coverage.place(_span()) is Placement.NEW
    before = coverage.missing()

    assert coverage.place(_span()) is Placement.DUPLICATE
    assert coverage.place(replace(_span(), sequence=6, sealed_ns=9)) is Placement.DUPLICATE

    assert coverage.missing() == before
    assert coverage.statistics().num_duplicates == 2
    assert [group.num_spans for group in coverage.statistics().groups] == [1, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"digest": b"x"},
        {"offset": 4096 + 2048},
        {"tokens": Range(5, 8), "offset": 4096 + 2048},
        {"layers": Range(1, 3), "offset": 4096 + 2048},
    ],
)
def test_an_overlap_is_refused_when_anything_differs(coverage: Coverage, change: dict[str, object]) -> None:
    """A cell that is placed is never placed again by another span."""
    coverage.place(_span())
    before = coverage.statistics()

    with pytest.raises(SpanOverlap):
        coverage.place(replace(_span(), sequence=6, **change))  # type: ignore[arg-type]

    assert coverage.statistics() == before


def test_an_overlap_names_the_model_layer_and_both_ranges(coverage: Coverage) -> None:
    """Whoever reads the error finds the place in the model."""
    coverage.place(_span(layers=Range(1, 2), tokens=Range(4, 7)))

    with pytest.raises(SpanOverlap) as caught:
        coverage.place(replace(_span(layers=Range(0, 2), tokens=Range(6, 8)), sequence=6, offset=8192))

    assert (caught.value.group_index, caught.value.layer_index) == (0, 2)
    assert (caught.value.tokens, caught.value.placed) == ("[6, 8)", "[4, 7)")


@pytest.mark.parametrize("shift", [-768 + 64, 0, 64, 1152 - 64])
def test_an_overlap_of_bytes_is_refused_when_the_cells_are_free(shift: int) -> None:
    """Two spans of a transfer never share a byte of the slab."""
    coverage = Coverage(GROUPS, REQUIRED, SLOT)
    first = make_span(WINDOWED, Range(0, 2), Range(4, 7), sequence=5, offset=6144)
    coverage.place(first)

    with pytest.raises(SpanOverlap, match=r"bytes .* of span 5"):
        coverage.place(make_span(WINDOWED, Range(0, 2), Range(7, 9), sequence=6, offset=6144 + shift))

    coverage.check_integrity()


def test_spans_may_touch_in_bytes_and_in_positions(coverage: Coverage) -> None:
    """Half-open ranges that touch do not overlap."""
    first = coverage.place(make_span(WINDOWED, Range(0, 2), Range(4, 7), sequence=5, offset=4096 + 768))
    below = coverage.place(make_span(WINDOWED, Range(0, 2), Range(7, 9), sequence=6, offset=4096))

    assert (first, below) == (Placement.NEW, Placement.NEW)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("group_index", {"group_index": 2}),
        ("group_index", {"group_index": -1}),
        ("layers", {"layers": Range(2, 4)}),
        ("layers", {"layers": Range(1, 1)}),
        ("tokens", {"tokens": Range(3, 6)}),
        ("tokens", {"tokens": Range(7, 10)}),
        ("tokens", {"tokens": Range(5, 5)}),
        ("length", {"length": 1152 + 64}),
        ("length", {"length": 0}),
        ("offset", {"offset": 4096 - 64}),
        ("offset", {"offset": 4096 + 8192 - 1152 + 64}),
        ("offset", {"offset": 4096 + 32}),
        ("offset", {"offset": -64}),
        ("sequence", {"sequence": -1}),
    ],
)
def test_a_span_is_refused_when_a_field_is_out_of_range(
    coverage: Coverage, field: str, change: dict[str, object]
) -> None:
    """The error names the field with what it is and what is allowed, and nothing changes."""
    before = (coverage.missing(), coverage.statistics())

    with pytest.raises(SpanOutOfRange) as caught:
        coverage.place(replace(_span(), **change))  # type: ignore[arg-type]

    assert caught.value.field == field
    assert str(caught.value.actual) == str(change[field])
    assert (coverage.missing(), coverage.statistics()) == before


def test_a_swapped_group_is_refused_when_the_shapes_differ(coverage: Coverage) -> None:
    """Group 1 has larger rows, so a span of group 0 told as group 1 has a wrong length."""
    swapped = replace(_span(layers=Range(0, 1)), group_index=1)

    with pytest.raises(SpanOutOfRange) as caught:
        coverage.place(swapped)

    assert caught.value.field == "length"


def test_a_sequence_number_is_refused_when_another_span_used_it(coverage: Coverage) -> None:
    """ReleaseSpan names a span by sequence, so a number means one span."""
    coverage.place(_span())

    with pytest.raises(SpanOutOfRange) as caught:
        coverage.place(replace(_span(tokens=Range(7, 9)), offset=8192))

    assert caught.value.field == "sequence"


def test_a_duplicate_leaves_nothing_behind(coverage: Coverage) -> None:
    """A peer that repeats a span under ever new numbers must not make us remember them."""
    coverage.place(_span())

    assert coverage.place(replace(_span(), sequence=77)) is Placement.DUPLICATE

    assert coverage.place(replace(_span(tokens=Range(7, 9)), sequence=77, offset=8192, length=768)) is (
        Placement.NEW
    )
    coverage.check_integrity()


def test_bytes_can_be_used_again_when_their_span_is_released(coverage: Coverage) -> None:
    """A slot smaller than the transfer is a window that is filled again after each release."""
    coverage.place(_span())

    coverage.release(5)

    assert coverage.place(replace(_span(tokens=Range(7, 9)), sequence=6, length=768)) is Placement.NEW
    assert coverage.place(_span()) is Placement.DUPLICATE


@pytest.mark.parametrize("sequence", [5, 8])
def test_release_is_refused_when_the_span_holds_no_bytes(coverage: Coverage, sequence: int) -> None:
    """Span 5 was released before and span 8 was never placed; both are our own mistake."""
    coverage.place(_span())
    coverage.release(5)

    with pytest.raises(InvariantViolation, match=str(sequence)):
        coverage.release(sequence)


def test_statistics_count_spans_bytes_and_cells_per_group(coverage: Coverage) -> None:
    """A cell is one layer of one position; PrefillDone's totals are compared with these."""
    coverage.place(_span())
    coverage.place(make_span(FULL, Range(0, 1), Range(2, 6), sequence=6, offset=8192))

    windowed, full = coverage.statistics().groups

    assert (windowed.num_spans, windowed.span_bytes) == (1, 1152)
    assert (windowed.placed_cells, windowed.required_cells) == (6, 15)
    assert (full.num_spans, full.span_bytes, full.placed_cells, full.required_cells) == (1, 1536, 4, 7)
