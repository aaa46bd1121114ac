"""Sets of positions behave like sets."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.kv.ranges import Range, RangeSet

LIMIT = 24

ranges = st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT)).map(lambda pair: Range(min(pair), max(pair)))
many_ranges = st.lists(ranges, max_size=8)


def _build(added: list[Range]) -> RangeSet:
    built = RangeSet()
    for positions in added:
        built = built.with_range(positions)
    return built


def _positions(added: list[Range] | tuple[Range, ...]) -> set[int]:
    return {position for positions in added for position in positions}


@given(many_ranges)
def test_a_set_has_exactly_the_positions_that_were_added(added: list[Range]) -> None:
    """The union neither loses nor invents a position, and stays sorted with gaps between."""
    built = _build(added)

    assert _positions(built.ranges) == _positions(added)
    assert len(built) == len(_positions(added))
    assert all(a.stop < b.start for a, b in pairwise(built.ranges))
    assert all(map(len, built.ranges))


@given(many_ranges, st.data())
def test_equal_positions_are_equal_sets_whatever_the_order(added: list[Range], data: st.DataObject) -> None:
    """The order of arrival leaves no trace."""
    shuffled = data.draw(st.permutations(added))

    assert _build(shuffled) == _build(added)


@given(many_ranges, ranges)
def test_questions_agree_with_sets(added: list[Range], asked: Range) -> None:
    """Contains, overlap and gaps say what sets of integers say."""
    built = _build(added)
    positions = _positions(added)
    overlapping = built.overlapping(asked)

    assert built.contains(asked) == (set(asked) <= positions)
    assert (overlapping is not None) == bool(set(asked) & positions)
    assert _positions(built.missing_from(asked)) == set(asked) - positions


@given(many_ranges, ranges)
def test_what_is_left_without_a_range_is_a_set_again(added: list[Range], removed: Range) -> None:
    """Nothing else is lost, and the rest equals the set of the same positions built up."""
    left = _build(added).without(removed)

    assert _positions(left.ranges) == _positions(added) - set(removed)
    assert left == _build(list(left.ranges))


@given(ranges, ranges)
def test_two_ranges_agree_with_sets(one: Range, other: Range) -> None:
    """Intersection, overlap and containment of ranges say what sets say."""
    assert set(one.intersection(other)) == set(one) & set(other)
    assert one.overlaps(other) == bool(set(one) & set(other))
    assert one.contains(other) == (set(other) <= set(one))
