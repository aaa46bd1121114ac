"""Which pages of one group are free.

Theory of operation: pages are numbers. `take` prefers one contiguous run, because attention over a run of
pages is a view and over scattered pages a copy; when there is none it gives the largest runs first.

Ownership: one pool per group, owned by `KVCache`, used on the event loop only.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvariantViolation, PagesExhausted
from common.kv.ranges import Range, RangeSet


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Pages of one group."""

    total: int
    free: int


class PagePool:
    """The free pages of one group."""

    def __init__(self, group_index: int, num_pages: int) -> None:
        self._group_index = group_index
        self._num_pages = num_pages
        self._free = RangeSet().with_range(Range(0, num_pages))
        # Invariant: _free is within [0, num_pages); whatever else is in there is taken.

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` pages, adjacent when possible.

        Raises: `PagesExhausted`; nothing changed.
        """
        if count > self.num_free:
            raise PagesExhausted(self._group_index, count, self.num_free)
        # The tightest run that holds all, so that long runs stay for long prompts. Where none does, the
        # longest first: every further run costs attention a copy.
        fitting = [run for run in self._free.ranges if len(run) >= count]
        runs = [min(fitting, key=len)] if fitting else sorted(self._free.ranges, key=len, reverse=True)
        pages: list[int] = []
        for run in runs:
            piece = Range(run.start, min(run.stop, run.start + count - len(pages)))
            self._free = self._free.without(piece)
            pages += piece
        return tuple(pages)

    def give_back(self, pages: tuple[int, ...]) -> None:
        """Return pages that were taken.

        Raises: `InvariantViolation` when one was not taken or is returned twice; nothing changed.
        """
        free = self._free
        for page in pages:
            if not 0 <= page < self._num_pages or free.contains(Range(page, page + 1)):
                raise InvariantViolation(f"group {self._group_index}: pages {pages} were not all taken")
            free = free.with_range(Range(page, page + 1))
        self._free = free

    def statistics(self) -> PoolStatistics:
        """Return the counts now."""
        return PoolStatistics(self._num_pages, self.num_free)

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when a free page is none of the pool."""
        if not all(Range(0, self._num_pages).contains(run) for run in self._free.ranges):
            raise InvariantViolation(
                f"group {self._group_index} of {self._num_pages} pages: {self._free.ranges} are free"
            )
