"""The pages one request holds in every group, and how a window slides over them.

Theory of operation: a full group's table covers prompt and growth from the start. A windowed group holds a
fixed number of pages; when the sequence reaches a page it has no row for, the pages that no later query can
see come back from the front and go to the end, so that a sequence never asks the pool for more.

    before   first_page = 3   [ p7 | p8 | p2 ]      positions of page 3 are out of sight
    after    first_page = 4   [ p8 | p2 | p7 ]

Ownership: made by `KVCache.reserve`; used by the importer (tables only) until publication, then by the step
loop alone until the sequence is retired.
"""

from __future__ import annotations

from common.errors import InvariantViolation
from common.kv.tables import PageTable
from decode_service.cache.spec import CacheGeometry, first_page


class SequencePages:
    """Page tables of one request, one per group."""

    def __init__(self, geometry: CacheGeometry, prompt_len: int, pages: tuple[tuple[int, ...], ...]) -> None:
        self._windows = tuple(group.window for group in geometry.groups)
        self._pages = pages
        self._tables = tuple(
            PageTable(geometry.page_tokens, first_page(group, prompt_len, geometry.page_tokens), taken)
            for group, taken in zip(geometry.groups, pages, strict=True)
        )
        # Invariant: table g holds exactly the pages taken for group g, in some rotation.

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """Where the positions lie now, by group index."""
        return self._tables

    @property
    def pages(self) -> tuple[tuple[int, ...], ...]:
        """The pages held, by group index; never changes."""
        return self._pages

    def advance(self, position: int) -> tuple[PageTable, ...]:
        """Make sure that `position` has a row in every group, and return the tables.

        Raises: `InvariantViolation` when the reservation is too small for it.
        """
        self._tables = tuple(
            table if position < table.extent.stop else _slide(table, window, position)
            for table, window in zip(self._tables, self._windows, strict=True)
        )
        return self._tables

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when a table lost or gained a page."""
        for table, taken in zip(self._tables, self._pages, strict=True):
            if sorted(table.pages) != sorted(taken):
                raise InvariantViolation(f"table has pages {table.pages}, reserved are {taken}")


def _slide(table: PageTable, window: int | None, position: int) -> PageTable:
    if window is None:
        raise InvariantViolation(f"position {position} is beyond the reserved extent {table.extent}")
    # The query at `position` sees itself and window - 1 before it. Pages before the first of these are free
    # for what comes; a page that holds even one visible position stays.
    visible_page = max(0, position - window + 1) // table.page_tokens
    # A jump beyond the whole table turns it once round: all pages are out of sight, and their order is kept.
    dropped = min(visible_page - table.first_page, len(table.pages))
    slid = PageTable(
        table.page_tokens, table.first_page + dropped, table.pages[dropped:] + table.pages[:dropped]
    )
    if position >= slid.extent.stop:
        raise InvariantViolation(f"position {position} is beyond the reserved extent {slid.extent}")
    return slid
