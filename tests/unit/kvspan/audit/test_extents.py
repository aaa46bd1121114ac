"""Tests of disjoint ranges and who holds them."""

from __future__ import annotations

import pytest

from common.kv.ranges import Range
from kvspan.audit.extents import Extents


@pytest.fixture
def extents() -> Extents:
    """Return two ranges with a gap of three between them."""
    held = Extents()
    assert held.add(Range(4, 9), "low") is None
    assert held.add(Range(12, 20), "high") is None
    return held


@pytest.mark.parametrize(
    ("wanted", "other"),
    [
        (Range(0, 4), None),
        (Range(9, 12), None),
        (Range(20, 21), None),
        (Range(6, 6), None),
        (Range(0, 5), "low"),
        (Range(5, 6), "low"),
        (Range(8, 12), "low"),
        (Range(11, 13), "high"),
        (Range(0, 30), "low"),
        (Range(12, 20), "high"),
    ],
)
def test_overlap_names_the_holder(extents: Extents, wanted: Range, other: str | None) -> None:
    """Ranges that touch are disjoint; one shared position is an overlap."""
    assert extents.add(wanted, "new") == other
    assert len(extents) == (3 if other is None and len(wanted) else 2)


def test_removed_range_is_free(extents: Extents) -> None:
    """What was given back can be taken by another."""
    extents.remove(Range(4, 9), "low")

    assert extents.add(Range(3, 12), "new") is None


def test_refused_range_takes_nothing_along_when_it_is_removed(extents: Extents) -> None:
    """The end of a holder that was refused does not free what another holds."""
    assert extents.add(Range(4, 9), "new") == "low"

    extents.remove(Range(4, 9), "new")

    assert extents.add(Range(4, 9), "third") == "low"
