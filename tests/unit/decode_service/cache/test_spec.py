"""How many pages a request needs in each group."""

import pytest

from common.kv.geometry import GroupGeometry
from decode_service.cache.spec import first_page, page_bytes, page_need, pool_pages, window_pages
from tests.support.factories import make_geometry, make_hybrid_geometry, paged


def make_windowed(window: int, page_tokens: int = 4) -> tuple[GroupGeometry, int]:
    """Return the only group of a windowed model, and its page size."""
    return paged(make_geometry(window=window), page_tokens).groups[0], page_tokens


def test_a_page_has_the_rows_of_every_layer_of_its_group() -> None:
    """2 layers x keys and values x 4 tokens x 3 heads of 8 float32."""
    assert page_bytes(make_geometry().groups[0], 4) == 2 * 2 * 4 * 3 * 8 * 4


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "pages"),
    [(1, 1, 1), (4, 1, 1), (4, 2, 2), (5, 1, 2), (5, 4, 2), (5, 5, 3), (8, 1, 2)],
)
def test_full_attention_needs_prompt_and_growth_without_the_last_token(
    prompt_len: int, max_new_tokens: int, pages: int
) -> None:
    """The last new token is returned and never read, so it has no KV."""
    assert page_need(paged(make_geometry()), prompt_len, max_new_tokens) == (pages,)


@pytest.mark.parametrize(
    ("window", "page_tokens", "pages"),
    [(2, 4, 2), (5, 4, 2), (6, 4, 3), (24, 16, 3), (17, 16, 2), (32, 16, 3), (33, 16, 3), (34, 16, 4)],
)
def test_a_window_touches_one_page_more_than_it_fills(window: int, page_tokens: int, pages: int) -> None:
    """ceil((W - 1) / B) + 1: a window that begins on the last row of a page reaches furthest."""
    assert window_pages(window, page_tokens) == pages


def test_a_long_request_holds_no_more_pages_of_a_window_than_the_window_touches() -> None:
    """Growth of a windowed group is paid by the pages that fall out of sight."""
    geometry = paged(make_hybrid_geometry(windows=(6, None)))

    assert page_need(geometry, 50, 31) == (3, 20)


def test_a_short_request_holds_fewer_pages_of_a_window_than_the_window_touches() -> None:
    """What is never reached is not reserved."""
    assert page_need(paged(make_geometry(window=30)), 3, 2) == (1,)


def test_the_first_page_is_that_of_the_first_position_the_next_token_sees() -> None:
    """A window of 6 at position 21 sees 16 to 20 before it: page 4."""
    group, page_tokens = make_windowed(6)

    assert [first_page(group, length, page_tokens) for length in (1, 5, 9, 20, 21)] == [0, 0, 1, 3, 4]


def test_a_pool_of_a_windowed_group_holds_every_lane_and_no_more_than_the_cache() -> None:
    """Full groups are sized by tokens, rounded up; windowed ones by lanes."""
    geometry = paged(make_hybrid_geometry(windows=(6, None)))

    assert pool_pages(geometry, 101, 5) == (15, 26)
    assert pool_pages(geometry, 101, 11) == (26, 26)
