"""Pages of every group, taken and returned together."""

from collections.abc import Iterator

import pytest

from common.errors import InvariantViolation, PagesExhausted, PromptTooLong
from decode_service.cache.cache import CacheStatistics, KVCache
from decode_service.cache.pool import PoolStatistics
from tests.support.factories import make_hybrid_geometry, paged

GEOMETRY = paged(make_hybrid_geometry(windows=(6, None)))
NUM_PAGES = (5, 9)
EMPTY = CacheStatistics((PoolStatistics(5, 5), PoolStatistics(9, 9)), 0)


@pytest.fixture
def cache() -> Iterator[KVCache]:
    """Five pages of a windowed group, nine of a full one; checked at the end."""
    cache = KVCache(GEOMETRY, NUM_PAGES)
    yield cache
    cache.check_integrity()


def test_a_reservation_takes_what_it_needs_in_every_group(cache: KVCache) -> None:
    """A prompt of 10 and 4 new tokens: two window pages from page 1 on, four full ones."""
    held = cache.reserve(10, 4)

    assert [(table.first_page, len(table.pages)) for table in held.tables] == [(1, 3), (0, 4)]
    assert cache.statistics().num_reservations == 1


def test_a_reservation_takes_nothing_when_a_later_group_is_full(cache: KVCache) -> None:
    """S7: Pages in every group or in none."""
    first = cache.reserve(3, 30)
    before = cache.statistics()

    with pytest.raises(PagesExhausted):
        cache.reserve(3, 4)

    assert cache.statistics() == before
    cache.give_back(first)
    assert cache.statistics() == EMPTY


def test_can_reserve_says_what_reserve_does(cache: KVCache) -> None:
    """The window pool alone can be what is missing."""
    assert cache.can_reserve(10, 4)
    cache.reserve(10, 4)
    assert not cache.can_reserve(10, 4)
    assert cache.can_reserve(3, 2)


def test_pages_that_nobody_holds_are_a_broken_invariant() -> None:
    """Once nothing is reserved every page is free, or one was lost."""
    cache = KVCache(GEOMETRY, NUM_PAGES)
    held = cache.reserve(10, 4)
    # Nobody else can lose a page: this is what the book of a cache with a bug looks like.
    cache._num_reservations = 0

    with pytest.raises(InvariantViolation, match="nothing is reserved"):
        cache.check_integrity()

    cache._num_reservations = 1
    cache.give_back(held)


def test_giving_back_restores_the_start(cache: KVCache) -> None:
    """No page is lost, whatever the order."""
    first, second = cache.reserve(10, 4), cache.reserve(3, 5)
    cache.give_back(first)
    cache.give_back(second)

    assert cache.statistics() == EMPTY


def test_giving_back_twice_is_refused(cache: KVCache) -> None:
    """The second owner of a page would lose it."""
    held = cache.reserve(10, 4)
    cache.give_back(held)

    with pytest.raises(InvariantViolation):
        cache.give_back(held)

    assert cache.statistics() == EMPTY


@pytest.mark.parametrize(("prompt_len", "max_new_tokens"), [(36, 1), (1, 36), (20, 17)])
def test_what_fits_an_empty_cache_exactly_is_not_refused(
    cache: KVCache, prompt_len: int, max_new_tokens: int
) -> None:
    """36 positions are nine pages of four."""
    cache.check_fits(prompt_len, max_new_tokens)


@pytest.mark.parametrize(("prompt_len", "max_new_tokens"), [(37, 1), (1, 37), (1000, 1)])
def test_what_never_fits_is_refused_with_the_numbers(
    cache: KVCache, prompt_len: int, max_new_tokens: int
) -> None:
    """Waiting would not help."""
    with pytest.raises(PromptTooLong) as refusal:
        cache.check_fits(prompt_len, max_new_tokens)

    assert (refusal.value.needed, refusal.value.limit) == (-(-(prompt_len + max_new_tokens - 1) // 4), 9)


def test_a_pool_smaller_than_one_window_refuses_what_needs_the_whole_window() -> None:
    """A windowed group can be the one that is too small."""
    cache = KVCache(GEOMETRY, (2, 9))

    cache.check_fits(5, 4)
    with pytest.raises(PromptTooLong) as refusal:
        cache.check_fits(9, 6)

    assert (refusal.value.needed, refusal.value.limit) == (3, 2)
