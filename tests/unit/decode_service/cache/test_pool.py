"""Which pages of one group are free."""

from collections.abc import Iterator

import pytest

from common.errors import InvariantViolation, PagesExhausted
from decode_service.cache.pool import PagePool, PoolStatistics


@pytest.fixture
def pool() -> Iterator[PagePool]:
    """Ten pages of group 3; checked at the end."""
    pool = PagePool(3, 10)
    yield pool
    pool.check_integrity()


def test_the_shortest_run_that_fits_is_used_first(pool: PagePool) -> None:
    """Long runs are kept for long requests."""
    taken = pool.take(10)
    pool.give_back(taken[0:5])
    pool.give_back(taken[6:8])

    assert pool.take(2) == (6, 7)


def test_the_longest_runs_come_first_when_no_run_is_long_enough(pool: PagePool) -> None:
    """Few runs, though no single one fits."""
    taken = pool.take(10)
    pool.give_back(taken[0:2])
    pool.give_back(taken[4:7])

    assert pool.take(4) == (4, 5, 6, 0)


def test_taking_too_many_changes_nothing(pool: PagePool) -> None:
    """The error has group, wish and rest."""
    pool.take(4)

    with pytest.raises(PagesExhausted) as refusal:
        pool.take(7)

    assert (refusal.value.group_index, refusal.value.requested, refusal.value.free) == (3, 7, 6)
    assert pool.statistics() == PoolStatistics(10, 6)


def test_no_page_is_an_empty_taking_also_when_none_is_free(pool: PagePool) -> None:
    """A request that needs nothing of a group is served from a full pool."""
    pool.take(10)

    assert pool.take(0) == ()


@pytest.mark.parametrize("returned", [(1, 4), (1, 1), (11,), (-1,)])
def test_giving_back_what_was_not_taken_is_refused(pool: PagePool, returned: tuple[int, ...]) -> None:
    """One wrong page refuses all of them: a page returned twice would be handed out twice."""
    pool.take(3)

    with pytest.raises(InvariantViolation):
        pool.give_back(returned)

    assert pool.num_free == 7


def test_a_pool_may_have_no_page() -> None:
    """An empty pool refuses and contradicts nothing."""
    pool = PagePool(0, 0)

    with pytest.raises(PagesExhausted):
        pool.take(1)

    pool.check_integrity()
