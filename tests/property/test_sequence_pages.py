"""What a token sees always has a row of its own, for every window, page size and prompt."""

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_service.cache.cache import KVCache
from decode_service.cache.spec import page_need, pool_pages, window_pages
from tests.support.factories import make_hybrid_geometry, paged


@given(
    window=st.integers(2, 40),
    page_tokens=st.integers(1, 16),
    prompt_len=st.integers(1, 90),
    max_new_tokens=st.integers(1, 90),
)
@settings(max_examples=150)
def test_a_window_sliding_token_by_token_always_holds_what_is_seen(
    window: int, page_tokens: int, prompt_len: int, max_new_tokens: int
) -> None:
    """Every position a token sees, and its own, has a row that was not given to a later position."""
    geometry = paged(make_hybrid_geometry(windows=(window, None)), page_tokens)
    tokens = prompt_len + max_new_tokens
    cache = KVCache(geometry, pool_pages(geometry, tokens, num_lanes=1))
    pages = cache.reserve(prompt_len, max_new_tokens)
    owner: list[dict[int, int]] = [{}, {}]
    """By group: row to the position last written there."""
    for group, table in zip(geometry.groups, pages.tables, strict=True):
        for position in group.visible(prompt_len):
            owner[group.group_index][table.row(position)] = position

    for position in range(prompt_len, tokens - 1):
        tables = pages.advance(position)
        for group, table in zip(geometry.groups, tables, strict=True):
            rows = owner[group.group_index]
            rows[table.row(position)] = position
            assert all(rows[table.row(seen)] == seen for seen in group.visible(position))
        pages.check_integrity()

    cache.give_back(pages)
    cache.check_integrity()
    assert all(pool.free == pool.total for pool in cache.statistics().groups)


@given(window=st.integers(2, 40), page_tokens=st.integers(1, 16))
def test_the_most_pages_a_window_touches_is_exact(window: int, page_tokens: int) -> None:
    """ceil((W - 1) / B) + 1 is enough for every alignment, and reached by the worst unless B is 1."""
    touched = [(start + window - 1) // page_tokens - start // page_tokens + 1 for start in range(page_tokens)]

    assert max(touched) == window_pages(window, page_tokens)


@given(
    window=st.integers(2, 40),
    page_tokens=st.integers(1, 16),
    prompt_len=st.integers(1, 200),
    max_new_tokens=st.integers(1, 200),
)
def test_a_request_is_given_what_it_uses_and_a_window_no_more_than_its_pages(
    window: int, page_tokens: int, prompt_len: int, max_new_tokens: int
) -> None:
    """Full groups hold every position but the last new token's; windowed ones are bounded by the window."""
    geometry = paged(make_hybrid_geometry(windows=(window, None)), page_tokens)

    windowed, full = page_need(geometry, prompt_len, max_new_tokens)

    assert full == -(-(prompt_len + max_new_tokens - 1) // page_tokens)
    assert windowed <= min(full, window_pages(window, page_tokens))
