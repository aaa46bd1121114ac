"""Half-open ranges that must not overlap, each with the name of who holds it."""

from __future__ import annotations

from bisect import bisect_left, insort

from common.kv.ranges import Range


class Extents:
    """Disjoint ranges in order."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, str]] = []
        # Invariant: sorted and disjoint; first, stop and holder of every range added and not removed.

    def __len__(self) -> int:
        return len(self._held)

    def add(self, extent: Range, holder: str) -> str | None:
        """Add a range; when it overlaps one that is held, change nothing and return that one's holder."""
        if not len(extent):
            return None
        index = bisect_left(self._held, (extent.start,))
        for start, stop, other in self._held[max(0, index - 1) : index + 1]:
            if start < extent.stop and extent.start < stop:
                return other
        insort(self._held, (extent.start, extent.stop, holder))
        return None

    def remove(self, extent: Range, holder: str) -> None:
        """Remove a range that `holder` added; nothing happens when it was refused."""
        entry = (extent.start, extent.stop, holder)
        index = bisect_left(self._held, entry)
        if self._held[index : index + 1] == [entry]:
            del self._held[index]
