"""Which spans of one transfer have been placed, against what the transfer requires.

Theory of operation: per group and per layer of it, coverage is a set of disjoint positions inside the
required range, never a count of messages. A span enters whole or not at all. An exact repetition of a
placed span is counted and ignored; any other overlap, in positions or in slab bytes, is an error of this
transfer. Because what is placed is disjoint and in bounds, coverage is complete exactly when the number
of placed cells (one layer of one position) equals the number required.

    required   |first_token .................... prompt_len|
    layer 0    |xxxxxxxxxx|           |xxxxxxxxxxxxxxxxxxxx|   one gap: missing
    layer 1    |xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx|

Ownership: one `Coverage` per transfer attempt, used from one thread.

Not here: transfer, attempt, slot and generation of a span (`common/session` has compared them before),
the digest's truth (`digest.py`), when a complete coverage is published (`decode_service/cache`).
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

from common.errors import InvariantViolation, SpanOutOfRange, SpanOverlap
from common.kv.geometry import GroupGeometry
from common.kv.ranges import Range, RangeSet
from common.kv.spans import PART_ALIGNMENT, Span, span_bytes

_Descriptor = tuple[int, Range, Range, int, int, bytes]
"""What makes two spans the same: group, layers, tokens, offset, length, digest."""


class Placement(enum.Enum):
    """What placing a span did."""

    NEW = "new"
    DUPLICATE = "duplicate"
    """The same descriptor was placed before; nothing changed but a counter."""


@dataclass(frozen=True, slots=True)
class GroupCoverage:
    """How much of one group is placed; a cell is one layer of one position."""

    num_spans: int
    """Duplicates excluded."""

    span_bytes: int
    """Sum of the lengths of the placed spans, pads included."""

    placed_cells: int
    required_cells: int


@dataclass(frozen=True, slots=True)
class CoverageStatistics:
    """What one transfer has placed so far."""

    num_duplicates: int
    """Spans counted and ignored."""

    groups: tuple[GroupCoverage, ...]
    """One per group, by group index."""


class Coverage:
    """The placed spans of one transfer attempt."""

    def __init__(
        self, groups: tuple[GroupGeometry, ...], required: tuple[Range, ...], slot_bytes: Range
    ) -> None:
        """Start empty.

        `required` has the positions to carry, one range per group. `slot_bytes` has the bytes of the
        leased slot, counted from the start of the slab.
        """
        if len(groups) != len(required):
            raise ValueError(f"{len(groups)} groups need as many required ranges, got {len(required)}")
        self._groups = groups
        self._required = required
        self._slot_bytes = slot_bytes
        # Invariant: _layers[g][l] holds the positions of group layer l, all inside _required[g].
        self._layers = [[RangeSet()] * group.num_layers for group in groups]
        # Invariant: len(_placed) = num_spans; each value is the span that was placed first.
        self._placed: dict[_Descriptor, Span] = {}
        self._by_sequence: dict[int, _Descriptor] = {}
        # Invariant: len(_by_sequence) = num_spans; a repetition takes no memory, whatever its number.
        # Invariant: sorted, disjoint, inside _slot_bytes; first byte, stop and sequence of each span that
        # is placed and not released.
        self._occupied: list[tuple[int, int, int]] = []
        # Invariant: 0 <= _missing_cells = required cells - placed cells.
        self._missing_cells = sum(
            len(tokens) * group.num_layers for group, tokens in zip(groups, required, strict=True)
        )
        self._num_duplicates = 0

    @property
    def num_missing(self) -> int:
        """Positions that are not placed, of all layers: no more spans than that can follow."""
        return self._missing_cells

    @property
    def is_complete(self) -> bool:
        """Tell whether every layer of every group has every required position."""
        return self._missing_cells == 0

    def place(self, span: Span) -> Placement:
        """Add the cells of a span, or count it when it repeats a placed one exactly.

        Raises, and nothing changed: `SpanOutOfRange` when a field lies outside what this transfer may
        carry or a sequence number is reused for another span; `SpanOverlap` when some cell or some byte
        belongs to another placed span.
        """
        # The number first: it may not name two spans. Then a repetition, whose cells and bytes are taken by
        # itself. All checks come before `_add`, and that of the group before it is used as an index.
        descriptor = _descriptor(span)
        self._check_sequence(span, descriptor)
        if descriptor in self._placed:
            self._num_duplicates += 1
            return Placement.DUPLICATE
        self._check_ranges(span)
        self._check_bytes(span)
        self._check_cells(span)
        self._check_occupied(span)
        self._add(span, descriptor)
        return Placement.NEW

    def release(self, sequence: int) -> None:
        """Let later spans use the bytes of a placed span; its cells stay placed.

        Called when the span has been imported and credit for it is about to be given back.

        Raises: `InvariantViolation` when no span with this sequence number occupies bytes.
        """
        descriptor = self._by_sequence.get(sequence)
        entry = _entry(self._placed[descriptor]) if descriptor is not None else None
        index = bisect_left(self._occupied, entry) if entry is not None else 0
        if entry is None or self._occupied[index : index + 1] != [entry]:
            raise InvariantViolation(f"span {sequence} is not placed or is released already")
        # The cells stay: the same positions sealed again would be an overlap, whatever bytes they lie in.
        del self._occupied[index]

    def missing(self) -> tuple[str, ...]:
        """Return what is not placed as text, one entry per group, layers with equal gaps, and gap."""
        return tuple(
            f"group {group.group_index} layers {_compact(layers)} tokens {gap}"
            for group, required, placed in zip(self._groups, self._required, self._layers, strict=True)
            for gap, layers in _gaps(group, required, placed).items()
        )

    def statistics(self) -> CoverageStatistics:
        """Return what is placed now."""
        groups = tuple(self._group_coverage(group.group_index) for group in self._groups)
        return CoverageStatistics(self._num_duplicates, groups)

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when the parts of this object disagree."""
        groups = self.statistics().groups
        missing_cells = sum(group.required_cells - group.placed_cells for group in groups)
        if missing_cells != self._missing_cells:
            raise InvariantViolation(f"{missing_cells} cells are missing, counted {self._missing_cells}")
        span_cells = sum(len(span.layers) * len(span.tokens) for span in self._placed.values())
        placed_cells = sum(group.placed_cells for group in groups)
        if span_cells != placed_cells:
            raise InvariantViolation(f"spans have {span_cells} cells, layers have {placed_cells}")
        for required, layers in zip(self._required, self._layers, strict=True):
            if any(not required.contains(placed) for layer in layers for placed in layer.ranges):
                raise InvariantViolation(f"a placed position is outside {required}")
        for (_, stop, before), (start, _, after) in pairwise(self._occupied):
            if stop > start:
                raise InvariantViolation(f"bytes of spans {before} and {after} overlap")

    def _check_sequence(self, span: Span, descriptor: _Descriptor) -> None:
        if span.sequence < 0:
            raise SpanOutOfRange("sequence", span.sequence, "0 or more")
        used_for = self._by_sequence.get(span.sequence)
        if used_for is not None and used_for != descriptor:
            raise SpanOutOfRange("sequence", span.sequence, "a number not used for another span")

    def _check_ranges(self, span: Span) -> None:
        if not 0 <= span.group_index < len(self._groups):
            raise SpanOutOfRange("group_index", span.group_index, Range(0, len(self._groups)))
        allowed_layers = Range(0, self._groups[span.group_index].num_layers)
        if not len(span.layers) or not allowed_layers.contains(span.layers):
            raise SpanOutOfRange("layers", span.layers, f"not empty, within {allowed_layers}")
        allowed_tokens = self._required[span.group_index]
        if not len(span.tokens) or not allowed_tokens.contains(span.tokens):
            raise SpanOutOfRange("tokens", span.tokens, f"not empty, within {allowed_tokens}")

    def _check_bytes(self, span: Span) -> None:
        group = self._groups[span.group_index]
        allowed_length = span_bytes(group, len(span.layers), len(span.tokens))
        if span.length != allowed_length:
            raise SpanOutOfRange("length", span.length, allowed_length)
        if span.offset % PART_ALIGNMENT:
            raise SpanOutOfRange("offset", span.offset, f"a multiple of {PART_ALIGNMENT}")
        # Below the start when the span is longer than the slot: then no offset is right.
        last_offset = self._slot_bytes.stop - span.length
        if not self._slot_bytes.start <= span.offset <= last_offset:
            allowed = f"bytes within {self._slot_bytes} for a length of {span.length}"
            raise SpanOutOfRange("offset", span.offset, allowed)

    def _check_cells(self, span: Span) -> None:
        layers = self._layers[span.group_index]
        for layer in span.layers:
            placed = layers[layer].overlapping(span.tokens)
            if placed is not None:
                raise self._overlap(span, layer, str(placed))

    def _check_occupied(self, span: Span) -> None:
        # What is occupied is disjoint, so that only the neighbours of its place can reach into the span:
        #
        #     occupied   |a----|      |b---|     |c--|
        #     span                |xxxxx|                  between a and b: a.stop or b.start decides
        index = bisect_left(self._occupied, _entry(span))
        for start, stop, sequence in self._occupied[max(0, index - 1) : index + 1]:
            if start < span.offset + span.length and span.offset < stop:
                raise self._overlap(span, span.layers.start, f"bytes [{start}, {stop}) of span {sequence}")

    def _overlap(self, span: Span, layer: int, placed: str) -> SpanOverlap:
        layer_index = self._groups[span.group_index].layer_indices[layer]
        return SpanOverlap(span.group_index, layer_index, str(span.tokens), placed)

    def _add(self, span: Span, descriptor: _Descriptor) -> None:
        layers = self._layers[span.group_index]
        for layer in span.layers:
            layers[layer] = layers[layer].with_range(span.tokens)
        self._placed[descriptor] = span
        self._by_sequence[span.sequence] = descriptor
        insort(self._occupied, _entry(span))
        # All were missing: _check_cells found none placed, _check_ranges none outside what is required.
        self._missing_cells -= len(span.layers) * len(span.tokens)

    def _group_coverage(self, group_index: int) -> GroupCoverage:
        spans = [span for span in self._placed.values() if span.group_index == group_index]
        return GroupCoverage(
            num_spans=len(spans),
            span_bytes=sum(span.length for span in spans),
            placed_cells=sum(map(len, self._layers[group_index])),
            required_cells=len(self._required[group_index]) * self._groups[group_index].num_layers,
        )


def _descriptor(span: Span) -> _Descriptor:
    return (span.group_index, span.layers, span.tokens, span.offset, span.length, span.digest)


def _entry(span: Span) -> tuple[int, int, int]:
    return (span.offset, span.offset + span.length, span.sequence)


def _gaps(group: GroupGeometry, required: Range, placed: list[RangeSet]) -> dict[Range, list[int]]:
    """Return the model layers that miss each gap."""
    gaps: dict[Range, list[int]] = {}
    for layer_index, positions in zip(group.layer_indices, placed, strict=True):
        for gap in positions.missing_from(required):
            gaps.setdefault(gap, []).append(layer_index)
    return gaps


def _compact(indices: list[int]) -> str:
    """Write ascending numbers shortly: 0-2, 5."""
    layers = RangeSet()
    for index in indices:
        layers = layers.with_range(Range(index, index + 1))
    return ", ".join(
        str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in layers.ranges
    )
