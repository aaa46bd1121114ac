"""Half-open ranges of positions and disjoint sets of them.

Theory of operation: a `Range` holds absolute positions [start, stop). A `RangeSet` is a sorted tuple of
disjoint, non-adjacent, non-empty ranges, so two equal sets of positions are equal objects.

Not here: what the positions mean (`geometry.py`, `spans.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Positions start, start + 1, …, stop - 1."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"range needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def contains(self, other: Range) -> bool:
        """Tell whether every position of `other` is in this range."""
        # Nothing is everywhere: a group that requires no position is covered by no span.
        return len(other) == 0 or (self.start <= other.start and other.stop <= self.stop)

    def overlaps(self, other: Range) -> bool:
        """Tell whether some position is in both."""
        return self.start < other.stop and other.start < self.stop and len(self) > 0 and len(other) > 0

    def intersection(self, other: Range) -> Range:
        """Return the positions in both; an empty range when there are none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


_start, _stop = attrgetter("start"), attrgetter("stop")


@dataclass(frozen=True, slots=True)
class RangeSet:
    """A set of positions as disjoint ranges in order."""

    ranges: tuple[Range, ...] = ()
    """Invariant: sorted, non-empty, ranges[i].stop < ranges[i + 1].start."""

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def overlapping(self, candidate: Range) -> Range | None:
        """Return the first range that shares a position with `candidate`, if any."""
        if not len(candidate):
            return None
        # ranges[index] is the first that ends behind the candidate's start. All before it end too early; all
        # behind it start later than it does, so when it does not reach the candidate, they do not either.
        index = bisect_right(self.ranges, candidate.start, key=_stop)
        found = self.ranges[index : index + 1]
        return found[0] if found and found[0].start < candidate.stop else None

    def contains(self, candidate: Range) -> bool:
        """Tell whether every position of `candidate` is in the set."""
        # One range has to hold all of it: two never touch, so between any two a position is missing.
        index = bisect_right(self.ranges, candidate.start, key=_stop)
        return not len(candidate) or any(one.contains(candidate) for one in self.ranges[index : index + 1])

    def with_range(self, added: Range) -> RangeSet:
        """Return the union with `added`; touching ranges become one."""
        if not len(added):
            return self
        # Both ends inclusive, so that ranges which only touch melt too:
        #
        #     ranges   |a--|    |b--|  |c---|      |d-|      first = b (b.stop == added.start)
        #     added             .   |xxxxxxx|      .         last  = d (d.start > added.stop)
        first = bisect_left(self.ranges, added.start, key=_stop)
        last = bisect_right(self.ranges, added.stop, key=_start)
        touched = (added, *self.ranges[first:last])
        union = Range(min(map(_start, touched)), max(map(_stop, touched)))
        return RangeSet((*self.ranges[:first], union, *self.ranges[last:]))

    def without(self, removed: Range) -> RangeSet:
        """Return the positions that are not in `removed`."""
        if not len(removed):
            return self
        hole = RangeSet((removed,))
        return RangeSet(tuple(part for one in self.ranges for part in hole.missing_from(one)))

    def missing_from(self, required: Range) -> tuple[Range, ...]:
        """Return the parts of `required` that are not in the set, in order."""
        gaps = []
        position = required.start
        for placed in self.ranges:
            if placed.stop <= position:
                continue
            if placed.start >= required.stop:
                break
            if placed.start > position:
                gaps.append(Range(position, placed.start))
            position = placed.stop
        if position < required.stop:
            gaps.append(Range(position, required.stop))
        return tuple(gaps)
