"""Half-open ranges and disjoint sets of them."""

import pytest

from common.kv.ranges import Range, RangeSet


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4)])
def test_a_range_is_refused_when_it_is_negative_or_reversed(start: int, stop: int) -> None:
    """A range needs 0 <= start <= stop."""
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Range(start, stop)


def test_a_range_has_its_positions_and_text_when_asked() -> None:
    """Start is inside, stop is outside."""
    positions = Range(2, 5)

    assert list(positions) == [2, 3, 4]
    assert len(positions) == 3
    assert str(positions) == "[2, 5)"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Range(3, 7), True),
        (Range(4, 6), True),
        (Range(2, 5), False),
        (Range(5, 8), False),
        (Range(9, 9), True),
    ],
)
def test_a_range_contains_another_when_every_position_is_inside(other: Range, expected: bool) -> None:
    """An empty range has no position that could lie outside."""
    assert Range(3, 7).contains(other) is expected


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Range(6, 9), True),
        (Range(1, 4), True),
        (Range(7, 9), False),
        (Range(0, 3), False),
        (Range(5, 5), False),
    ],
)
def test_ranges_overlap_when_they_share_a_position(other: Range, expected: bool) -> None:
    """Touching ranges and empty ranges share nothing."""
    assert Range(3, 7).overlaps(other) is expected
    assert other.overlaps(Range(3, 7)) is expected


@pytest.mark.parametrize(("other", "expected"), [(Range(5, 9), Range(5, 7)), (Range(0, 4), Range(3, 4))])
def test_the_intersection_has_what_is_in_both(other: Range, expected: Range) -> None:
    """The intersection is the common part."""
    assert Range(3, 7).intersection(other) == expected


@pytest.mark.parametrize("other", [Range(0, 2), Range(8, 11), Range(7, 9)])
def test_the_intersection_is_empty_when_nothing_is_common(other: Range) -> None:
    """No common position gives an empty range and no error."""
    assert len(Range(3, 7).intersection(other)) == 0


def test_a_set_merges_ranges_when_they_touch() -> None:
    """Equal sets of positions are equal objects, however they were built."""
    built = RangeSet().with_range(Range(6, 9)).with_range(Range(1, 3)).with_range(Range(3, 6))

    assert built == RangeSet((Range(1, 9),))


def test_a_set_keeps_ranges_apart_when_a_position_lies_between() -> None:
    """One missing position keeps two ranges."""
    built = RangeSet().with_range(Range(4, 6)).with_range(Range(1, 3))

    assert built.ranges == (Range(1, 3), Range(4, 6))
    assert len(built) == 4


def test_a_set_is_the_same_when_an_empty_range_is_added() -> None:
    """An empty range adds nothing, wherever it lies."""
    before = RangeSet((Range(1, 3),))

    assert before.with_range(Range(7, 7)) == before


def test_a_set_names_the_range_that_overlaps() -> None:
    """The first range that shares a position is returned."""
    placed = RangeSet((Range(1, 3), Range(5, 8)))

    assert placed.overlapping(Range(2, 6)) == Range(1, 3)
    assert placed.overlapping(Range(3, 5)) is None


def test_a_set_contains_a_range_only_when_one_run_holds_all_of_it() -> None:
    """A gap inside the candidate means that it is not contained."""
    placed = RangeSet((Range(1, 3), Range(5, 8)))

    assert placed.contains(Range(5, 7))
    assert not placed.contains(Range(2, 6))
    assert placed.contains(Range(4, 4))


@pytest.mark.parametrize(
    ("required", "expected"),
    [
        (Range(0, 11), (Range(0, 2), Range(4, 6), Range(9, 11))),
        (Range(3, 7), (Range(4, 6),)),
        (Range(6, 9), ()),
        (Range(10, 13), (Range(10, 13),)),
        (Range(5, 5), ()),
    ],
)
def test_a_set_lists_its_gaps_inside_what_is_required(required: Range, expected: tuple[Range, ...]) -> None:
    """Gaps are given in order and never outside the required range."""
    placed = RangeSet((Range(2, 4), Range(6, 9)))

    assert placed.missing_from(required) == expected
