"""One transfer as decode's journal seals it, and what it lacks for its publication (rules 2, 3 and 5).

Theory of operation: coverage is kept per group and layer as disjoint positions, from imports alone and
independent of the service's own count. Bytes of the slot belong to a span from its submission until its
release or the end of the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.kv.ranges import Range, RangeSet
from common.kv.spans import align_up
from kvspan.audit.extents import Extents
from kvspan.audit.sealed import Descriptor


@dataclass(frozen=True, slots=True)
class Shape:
    """What the service says of its KV: per group, layers that own KV, and bytes of one row."""

    layers: tuple[int, ...]
    row_bytes: tuple[int, ...]

    def span_bytes(self, group: int, num_layers: int, num_tokens: int) -> int:
        """Return the length of a span, pads included."""
        return num_layers * align_up(2 * self.row_bytes[group] * num_tokens)


@dataclass(frozen=True, slots=True)
class Start:
    """What `transfer.started` says."""

    transfer: int
    attempt: int
    reservation: int
    slot: int
    generation: int
    extent: Range
    required: tuple[Range, ...]


class AuditedTransfer:
    """A transfer that has started and not drained; methods return what is wrong, empty when nothing is."""

    def __init__(self, start: Start, shape: Shape) -> None:
        """Start empty; raises ValueError when `start` does not fit the shape."""
        if len(start.required) != len(shape.layers):
            raise ValueError("required must have one range per group")
        self._start = start
        self._shape = shape
        self._coverage = [[RangeSet()] * layers for layers in shape.layers]
        self._submitted: dict[int, Descriptor] = {}
        # Invariant: spans under import, by sequence number.
        self._held: dict[int, Range] = {}
        self._bytes = Extents()
        # Invariant: _bytes has the extents of _held: spans submitted and not released.
        self._sequences: set[int] = set()
        self._totals = [[0, 0] for _ in shape.layers]
        self.end: str = ""
        """Verdict of the producer, or `lost`; empty while it may still write."""

        self.sealed_totals: tuple[tuple[int, int], ...] | None = None
        """Spans and bytes by group that the producer says it sealed."""

        self.outcome: str = ""
        """`published` or `aborted`, once decided."""

        self.is_completed = False

    @property
    def start(self) -> Start:
        """What it was started with."""
        return self._start

    @property
    def num_in_flight(self) -> int:
        """Spans whose import has not ended."""
        return len(self._submitted)

    def submit(self, sequence: int, span: Descriptor) -> Iterator[tuple[str, str]]:
        """Take a span for import; yields each broken rule with its problem."""
        name = f"span {sequence} of transfer {self._start.transfer}"
        if self.outcome:
            yield "R6", f"{name} is imported after the transfer was {self.outcome}"
        if self.end:
            yield "R3", f"{name} comes after the producer's end"
        if sequence in self._sequences:
            yield "R3", f"{name} was submitted before"
        if (span.slot, span.generation) != (self._start.slot, self._start.generation):
            yield "R3", f"{name} names slot {span.slot} of generation {span.generation}, not the one leased"
        if not self._start.extent.contains(span.extent):
            yield "R3", f"{name} has bytes {span.extent} outside the slot {self._start.extent}"
        yield from (("R3", f"{name} {problem}") for problem in self._problems(span))
        other = self._bytes.add(span.extent, str(sequence))
        if other is not None:
            yield "R5", f"{name} uses bytes {span.extent} of span {other}, which is not released"
        self._sequences.add(sequence)
        self._submitted[sequence] = span
        self._held[sequence] = span.extent

    def imported(self, sequence: int) -> str:
        """End an import well; the span counts as coverage."""
        span = self._submitted.pop(sequence, None)
        if span is None:
            return f"import of span {sequence} ends, which is not under way"
        if not self._is_inside(span):
            return ""
        layers = self._coverage[span.group]
        for layer in span.layers:
            if layers[layer].overlapping(span.tokens) is not None:
                return f"span {sequence} covers layer {layer} of tokens {span.tokens} again"
            layers[layer] = layers[layer].with_range(span.tokens)
        self._totals[span.group][0] += 1
        self._totals[span.group][1] += len(span.extent)
        return ""

    def refused(self, sequence: int) -> str:
        """End an import badly."""
        known = self._submitted.pop(sequence, None) is not None
        return "" if known else f"import of span {sequence} ends, which is not under way"

    def release(self, sequence: int) -> str:
        """Give the bytes of a span back to the producer."""
        if sequence in self._submitted:
            return f"span {sequence} is released while it is imported"
        extent = self._held.pop(sequence, None)
        if extent is None:
            return f"span {sequence} is released, which holds no bytes"
        self._bytes.remove(extent, str(sequence))
        return ""

    def lacks(self) -> Iterator[str]:
        """Yield everything that rule 2 asks for before publication and that has not happened."""
        if self.outcome:
            yield f"it was {self.outcome} before"
        if not self.is_completed:
            yield "it was not complete"
        if self.end != "done":
            yield f"the producer's end was {self.end or 'not seen'}"
        if self._submitted:
            yield f"{len(self._submitted)} imports were under way"
        totals = tuple((spans, num_bytes) for spans, num_bytes in self._totals)
        if self.sealed_totals is not None and self.sealed_totals != totals:
            yield f"spans and bytes by group: {self.sealed_totals} sealed, {totals} imported"
        missing = [
            f"group {group} layer {layer} tokens {gap}"
            for group, layers in enumerate(self._coverage)
            for layer, placed in enumerate(layers)
            for gap in placed.missing_from(self._start.required[group])
        ]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield f"{missing[0]}{more} were not imported"

    def _is_inside(self, span: Descriptor) -> bool:
        return span.group < len(self._coverage) and span.layers.stop <= self._shape.layers[span.group]

    def _problems(self, span: Descriptor) -> Iterator[str]:
        if not self._is_inside(span):
            yield f"has layers {span.layers} of group {span.group}, owned are {self._shape.layers}"
            return
        if not len(span.layers) or not len(span.tokens):
            yield "is empty"
        if not self._start.required[span.group].contains(span.tokens):
            yield f"has tokens {span.tokens} outside {self._start.required[span.group]}"
        length = self._shape.span_bytes(span.group, len(span.layers), len(span.tokens))
        if len(span.extent) != length:
            yield f"has {len(span.extent)} bytes, its shape needs {length}"
        for layer in span.layers:
            placed = self._coverage[span.group][layer].overlapping(span.tokens)
            if placed is not None:
                yield f"overlaps tokens {placed} of layer {layer}"
