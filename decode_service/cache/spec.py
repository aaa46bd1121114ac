"""How many pages a request needs in each group.

Theory of operation: a request reserves, before anything moves, every page it may ever use: prompt and all
new tokens (rule 1, and no running sequence can be robbed of its growth). A windowed group never needs more
pages at once than its window can touch:

    window of W tokens over pages of B:   | . . W |W W W W|W . . . |   at most ceil((W - 1) / B) + 1 pages

Pure. Not here: which pages (`pool.py`), where positions lie in them (`common/kv/tables.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.geometry import GroupGeometry, KVGeometry


@dataclass(frozen=True, slots=True)
class CacheGeometry(KVGeometry):
    """The KV of a model in pages; how large they are is decode's own business, and no peer hears of it."""

    page_tokens: int

    def __post_init__(self) -> None:
        """Raise `ValueError` for layers or pages that cannot be."""
        # Not super(): a class with slots is made twice, and super() would mean the first one.
        KVGeometry.__post_init__(self)
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {self.page_tokens}")

    @classmethod
    def of(cls, geometry: KVGeometry, page_tokens: int) -> CacheGeometry:
        """Return a model's KV in pages of this size."""
        return cls(geometry.layers, geometry.vocab_size, page_tokens)


def page_bytes(group: GroupGeometry, page_tokens: int) -> int:
    """Bytes of one page over all layers of the group."""
    return group.token_bytes * page_tokens


def first_page(group: GroupGeometry, prompt_len: int, page_tokens: int) -> int:
    """Return the logical page of the first position that decode needs after a prompt."""
    return group.visible(prompt_len).start // page_tokens


def page_need(geometry: CacheGeometry, prompt_len: int, max_new_tokens: int) -> tuple[int, ...]:
    """Return the pages that a request reserves in each group.

    The last new token is returned and never read, so prompt_len + max_new_tokens - 1 positions have KV.
    """
    #     |0 ........ prompt_len|first new ..... last but one|last new
    #     | prefill writes      | decode writes              | sampled, never fed: no KV
    stop = prompt_len + max_new_tokens - 1
    return tuple(_group_need(g, geometry.page_tokens, prompt_len, stop) for g in geometry.groups)


def pool_pages(geometry: CacheGeometry, cache_tokens: int, num_lanes: int) -> tuple[int, ...]:
    """Return the pages of each group's pool for a cache of `cache_tokens` tokens.

    Full groups hold cache_tokens. A windowed group holds what every lane can use at once, and no more
    than the full groups.
    """
    full = -(-cache_tokens // geometry.page_tokens)
    return tuple(
        full
        if group.window is None
        else min(full, num_lanes * window_pages(group.window, geometry.page_tokens))
        for group in geometry.groups
    )


def window_pages(window: int, page_tokens: int) -> int:
    """Return the most pages that `window` consecutive positions can touch."""
    # The worst start is the last position of a page: one page for it alone, the other window - 1 from the
    # front of theirs.
    return -(-(window - 1) // page_tokens) + 1


def _group_need(group: GroupGeometry, page_tokens: int, prompt_len: int, stop: int) -> int:
    # Pages before the window of the first step are never imported and never read: nothing is held for them.
    pages = -(-stop // page_tokens) - first_page(group, prompt_len, page_tokens)
    return pages if group.window is None else min(pages, window_pages(group.window, page_tokens))
