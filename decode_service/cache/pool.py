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
        self._free = RangeSet((Range(0, num_pages),)) if num_pages else RangeSet()
        # Invariant: taken pages and _free are disjoint and together are 0 .. num_pages - 1.
        self._taken: set[int] = set()

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
        fitting = [run for run in self._free.ranges if len(run) >= count]
        runs = [min(fitting, key=len)] if fitting else sorted(self._free.ranges, key=len, reverse=True)
        pages = tuple(page for run in runs for page in run)[:count]
        self._taken.update(pages)
        self._free = _runs_of(sorted(set(_pages_of(self._free)) - set(pages)))
        return pages

    def give_back(self, pages: tuple[int, ...]) -> None:
        """Return pages that were taken.

        Raises: `InvariantViolation` when one was not taken or is returned twice.
        """
        if len(set(pages)) != len(pages) or not self._taken.issuperset(pages):
            raise InvariantViolation(f"group {self._group_index}: pages {pages} were not all taken")
        self._taken.difference_update(pages)
        for page in pages:
            self._free = self._free.with_range(Range(page, page + 1))

    def statistics(self) -> PoolStatistics:
        """Return the counts now."""
        return PoolStatistics(self._num_pages, self.num_free)

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` unless taken and free pages make up the pool."""
        # Cheap where it runs in service: an idle pool has no taken pages and few runs of free ones.
        both = [page for page in self._taken if self._free.contains(Range(page, page + 1))]
        runs = self._free.ranges
        is_within = not runs or (runs[0].start >= 0 and runs[-1].stop <= self._num_pages)
        num_known = len(self._taken) + len(self._free)
        if both or not is_within or num_known != self._num_pages:
            counts = f"{len(self._taken)} pages taken, {self._free.ranges} free, {both} both"
            raise InvariantViolation(f"group {self._group_index} of {self._num_pages}: {counts}")


def _pages_of(free: RangeSet) -> list[int]:
    return [page for run in free.ranges for page in run]


def _runs_of(pages: list[int]) -> RangeSet:
    runs: list[Range] = []
    for page in pages:
        if runs and runs[-1].stop == page:
            runs[-1] = Range(runs[-1].start, page + 1)
        else:
            runs.append(Range(page, page + 1))
    return RangeSet(tuple(runs))
