"""The slabs that a prefill service has: their sum is bounded, and no two sessions share one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.errors import InvariantViolation, SlabNotShared
from common.slab.mapped import MappedSlabs, MappedStatistics, SlabLimits

FIRST, SECOND, THIRD = (7, 1), (7, 2), (8, 1)


@pytest.fixture
def slabs() -> Iterator[MappedSlabs]:
    """Room for 10 bytes, 6 in one, of which 4 are taken."""
    slabs = MappedSlabs(SlabLimits(6, 10))
    slabs.enter(FIRST, 4)
    yield slabs
    slabs.check_integrity()


def test_a_slab_counts_from_when_it_enters_until_it_leaves(slabs: MappedSlabs) -> None:
    """What has left may be entered again."""
    slabs.enter(SECOND, 6)
    slabs.leave(FIRST)
    slabs.enter(THIRD, 3)

    assert slabs.statistics() == MappedStatistics(2, 9)


def test_a_slab_that_a_session_has_is_refused(slabs: MappedSlabs) -> None:
    """The second would write over what was sealed in the first."""
    with pytest.raises(SlabNotShared, match=r"slab\.memory: .* prefill has it in another session"):
        slabs.enter(FIRST, 4)

    assert slabs.statistics() == MappedStatistics(1, 4)


def test_a_slab_has_a_largest_size(slabs: MappedSlabs) -> None:
    """Decode hears the limit and the flag that sets it."""
    slabs.check_size(6)

    with pytest.raises(SlabNotShared, match=r"decode 7, prefill takes 6 at most, see --max-slab-bytes"):
        slabs.check_size(7)


def test_all_slabs_together_have_a_largest_size(slabs: MappedSlabs) -> None:
    """The text has the limit and not what is taken of it just now: it is the same at every try."""
    slabs.enter(SECOND, 3)

    with pytest.raises(SlabNotShared, match=r"decode 4, prefill takes 10 of all sessions, see --max-slabs"):
        slabs.enter(THIRD, 4)

    slabs.enter(THIRD, 3)


def test_what_never_entered_cannot_leave(slabs: MappedSlabs) -> None:
    """Nor leave twice."""
    with pytest.raises(InvariantViolation, match="is not there"):
        slabs.leave(SECOND)
