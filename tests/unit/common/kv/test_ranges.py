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


def test_a_set_names_the_range_that_overlaps() -> None:
    """The first range that shares a position is returned."""
    placed = RangeSet((Range(1, 3), Range(5, 8)))

    assert placed.overlapping(Range(2, 6)) == Range(1, 3)
    assert placed.overlapping(Range(3, 5)) is None


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
