"""The spans of one transfer: which were placed, whose copies are under way, and whether that was all.

Theory of operation: a span is placed (`Coverage`) when every field of it was checked, and in flight until the
copy out of the slab has ended. What the producer says at its end must be what was placed.

Ownership: one object per transfer, owned by `DecodeTransfer`.
Not here: what a wrong span costs (`decode_transfer.py`), the copy (`decode_service/prefill/importer.py`).
"""

from __future__ import annotations

from common.errors import CoverageIncomplete, SpanOutOfRange, StaleGeneration, TotalsMismatch
from common.kv.coverage import Coverage, CoverageStatistics, Placement
from common.kv.spans import Span
from common.session.messages import GroupTotals, StartPrefill


class TransferSpans:
    """Takes spans in, and tells when their copies have ended."""

    def __init__(self, start: StartPrefill, coverage: Coverage) -> None:
        self._start = start
        self._coverage = coverage
        self._in_flight: set[int] = set()
        # Invariant: holds exactly the sequences that were placed and whose copy has not ended.
        self._num_cells = coverage.num_missing
        self._last_late = -1
        # Invariant: the highest sequence of those that came too late to be taken in.

    @property
    def num_in_flight(self) -> int:
        """Placed and not yet copied."""
        return len(self._in_flight)

    def statistics(self) -> CoverageStatistics:
        """Return what was placed."""
        return self._coverage.statistics()

    def place(self, span: Span) -> bool:
        """Take a span in; tell whether it must be copied, which an exact repetition need not.

        Raises: `TransferError` of the field that is wrong; nothing changed.
        """
        require_generation(self._start, span.generation)
        if span.slot_id != self._start.slot_id:
            raise SpanOutOfRange("slot_id", span.slot_id, self._start.slot_id)
        if self._coverage.place(span) is Placement.DUPLICATE:
            return False
        self._in_flight.add(span.sequence)
        return True

    def take_late(self, sequence: int) -> bool:
        """Tell whether a span that is placed no more can be honest: they ascend, and each has a cell."""
        if not self._last_late < sequence < self._num_cells:
            return False
        self._last_late = sequence
        return True

    def copy_ended(self, sequence: int) -> None:
        """Note that nothing reads the bytes of a span any more; `KeyError` when nothing did."""
        self._in_flight.remove(sequence)

    def release(self, sequence: int) -> None:
        """Allow other spans to use the bytes of a copied one."""
        self._coverage.release(sequence)

    def require_all(self, totals: tuple[GroupTotals, ...]) -> None:
        """Raise `TotalsMismatch` or `CoverageIncomplete` unless just this, and all required, was placed."""
        self._require_totals(totals)
        if not self._coverage.is_complete:
            raise CoverageIncomplete(self._coverage.missing())

    def _require_totals(self, totals: tuple[GroupTotals, ...]) -> None:
        received = self._coverage.statistics().groups
        if [total.group_index for total in totals] != list(range(len(received))):
            raise TotalsMismatch("groups", len(totals), len(received))
        for total, group in zip(totals, received, strict=True):
            pairs = (
                ("num_spans", total.num_spans, group.num_spans),
                ("num_bytes", total.num_bytes, group.span_bytes),
                ("layer_tokens", total.layer_tokens, group.placed_cells),
            )
            for field, theirs, ours in pairs:
                if theirs != ours:
                    raise TotalsMismatch(f"group {total.group_index} {field}", theirs, ours)


def require_generation(start: StartPrefill, generation: int) -> None:
    """Raise `StaleGeneration` when a message is about another lease of the slot."""
    if generation != start.generation:
        raise StaleGeneration("generation", start.generation, generation)
