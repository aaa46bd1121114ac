"""The decode service's KV cache as the rest of the service sees it: reserve, give back, count.

Theory of operation: five layers, each answering one question: `spec.py` how many pages, `pool.py` which
pages are free, `sequence_pages.py` and `common/kv/tables.py` where a position lies, this file all groups at
once, `storage.py` the bytes. A reservation takes pages in every group or in none.

Ownership: one `KVCache` per service, used on the event loop only. What makes a reservation readable is in
`decode_service/publication.py` and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvariantViolation, PromptTooLong
from decode_service.cache.pool import PagePool, PoolStatistics
from decode_service.cache.sequence_pages import SequencePages
from decode_service.cache.spec import CacheGeometry, page_need


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Pages by group, and reservations."""

    groups: tuple[PoolStatistics, ...]
    num_reservations: int


class KVCache:
    """Pages of every group."""

    def __init__(self, geometry: CacheGeometry, num_pages: tuple[int, ...]) -> None:
        self._geometry = geometry
        self._pools = tuple(
            PagePool(group.group_index, pages)
            for group, pages in zip(geometry.groups, num_pages, strict=True)
        )
        self._num_reservations = 0

    def check_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raise `PromptTooLong` when even the empty cache is too small for such a request."""
        need = page_need(self._geometry, prompt_len, max_new_tokens)
        for pool, pages in zip(self._pools, need, strict=True):
            if pages > pool.num_pages:
                raise PromptTooLong(
                    f"cache pages of {self._geometry.page_tokens} tokens", pages, pool.num_pages
                )

    def can_reserve(self, prompt_len: int, max_new_tokens: int) -> bool:
        """Tell whether `reserve` would succeed now."""
        need = page_need(self._geometry, prompt_len, max_new_tokens)
        return all(pages <= pool.num_free for pool, pages in zip(self._pools, need, strict=True))

    def reserve(self, prompt_len: int, max_new_tokens: int) -> SequencePages:
        """Take the pages of a request in every group.

        Raises: `PagesExhausted`; nothing changed.
        """
        need = page_need(self._geometry, prompt_len, max_new_tokens)
        taken: list[tuple[int, ...]] = []
        try:
            for pool, count in zip(self._pools, need, strict=True):
                taken.append(pool.take(count))
        except BaseException:
            for pool, pages in zip(self._pools, taken, strict=False):
                pool.give_back(pages)
            raise
        self._num_reservations += 1
        return SequencePages(self._geometry, prompt_len, tuple(taken))

    def give_back(self, held: SequencePages) -> None:
        """Return the pages of a request that nobody reads or writes any more."""
        for pool, pages in zip(self._pools, held.pages, strict=True):
            pool.give_back(pages)
        self._num_reservations -= 1

    def statistics(self) -> CacheStatistics:
        """Return the counts now."""
        return CacheStatistics(tuple(pool.statistics() for pool in self._pools), self._num_reservations)

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when a pool contradicts itself, or has lost pages that nobody holds."""
        for pool in self._pools:
            pool.check_integrity()
            if not self._num_reservations and pool.num_free != pool.num_pages:
                raise InvariantViolation(f"nothing is reserved, and pages are taken: {pool.statistics()}")
