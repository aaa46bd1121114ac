"""Packs finished KV into the slot of one transfer and says which spans are final.

Theory of operation: the span plan fixes where every row goes, so a row is copied once, straight from the
attention's output to its place, and becomes the session's element type on the way. A slot smaller than the
plan is a ring, which gives a span its place when its first layer is written and may wait for room then. The
mode decides only *when*:

    stream     copy when the layer is done, seal each span when its last layer is done
    deferred   copy when the layer is done, seal everything in `finish`
    whole      keep the arrays, copy and seal everything in `finish`; through a ring, seal each when copied

An engine must write what is wanted of every layer of every chunk once, in order; anything else fails the
prompt at once. What it hands over beside that is dropped. So a span is complete when its last layer is
written, and one that is sealed is never written again (rule 5).

Ownership: one writer per job, used on the engine's thread. It writes into memory that the job owns.

Not here: the cut into spans (`common/kv/plan.py`), room in a ring (`credit.py`), the stream
(`servicer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.engine.prefill import wanted_of
from common.errors import EngineFailed, SpanOutOfRange
from common.kv.digest import DigestKind, digest
from common.kv.elements import convert
from common.kv.geometry import DType, KVGeometry
from common.kv.plan import ChunkPlan, PlannedSpan, SpanPlan
from common.kv.ranges import Range
from common.kv.spans import Span, key_range, value_range
from common.kv.writer import Rows
from common.runtime.clock import Clock
from common.session.messages import GroupTotals, StartPrefill, TransferMode
from prefill_service.credit import CreditRing


@dataclass(frozen=True, slots=True)
class SlotTarget:
    """Where a job's KV goes and how it is sealed."""

    start: StartPrefill
    geometry: KVGeometry
    """Of the session: decode's groups, windows and element type."""

    produced: Mapping[int, DType]
    """Element type that the engine delivers, by model layer; the copy makes the session's of it."""

    memory: memoryview
    """The bytes of the slot, writable."""

    digest: DigestKind
    seal: Callable[[Span], None]
    """Called on the engine's thread with each final span."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """The next write that an engine owes."""

    layer_index: int
    chunk: ChunkPlan
    tokens: Range
    """What is wanted of the layer in the chunk; never empty."""

    def __str__(self) -> str:
        return f"layer {self.layer_index} of tokens {self.tokens}"


class SpanWriter:
    """The `KVWriter` of one transfer."""

    def __init__(
        self, plan: SpanPlan, target: SlotTarget, clock: Clock, ring: CreditRing | None = None
    ) -> None:
        """Raises `SpanOutOfRange` when the slot is too small for the plan and there is no ring."""
        if ring is None and plan.total_bytes > len(target.memory):
            raise SpanOutOfRange("slot_size", len(target.memory), f"at least {plan.total_bytes}")
        self._places = target.geometry.by_layer
        self._wanted = wanted_of(target.geometry, target.start.required)
        self._turns = self._in_order(plan.chunks)
        self._expected = next(self._turns, None)
        # Invariant: the write that has to come next; None when all were taken.
        self._target = target
        self._clock = clock
        self._ring = ring
        self._in_ring: dict[int, PlannedSpan] = {}
        # Invariant: by group, the span last begun, with its place in the ring.
        self._chunk_spans: tuple[int, tuple[PlannedSpan, ...]] = (-1, ())
        # Invariant: start of a chunk, and the planned spans of it.
        self._kept: list[tuple[_Turn, Rows, Rows]] = []
        self._unsealed: list[Span] = []
        self._totals = [[0, 0, 0] for _ in target.geometry.groups]
        self._sequence = 0

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Take the KV of one layer for one chunk, or for the part of it that is wanted; see `KVWriter`.

        Raises: `EngineFailed` when it is not this layer's and chunk's turn, rows have another size, or a
        number does not fit the session's element type; what `CreditRing.open` raises.
        """
        if not tokens.intersection(self._wanted.get(layer_index, tokens)):
            return
        turn = self._take_turn(layer_index, tokens)
        self._check_rows(layer_index, tokens, keys, values)
        self._expected = next(self._turns, None)
        part = slice(turn.tokens.start - tokens.start, turn.tokens.stop - tokens.start)
        if self._target.start.mode is TransferMode.WHOLE:
            self._kept.append((turn, keys[part], values[part]))
        else:
            self._place(turn, keys[part], values[part])

    def finish(self) -> tuple[GroupTotals, ...]:
        """Write and seal what the mode held back; return the totals that PrefillDone carries.

        Raises: `EngineFailed` when the engine left out a layer or a chunk; what `CreditRing.open` raises.
        """
        if self._expected is not None:
            raise EngineFailed(f"ended without {self._expected}")
        for kept in self._kept:
            self._place(*kept)
        self._kept.clear()
        for span in self._unsealed:
            self._target.seal(replace(span, sealed_ns=self._clock.now_ns()))
        self._unsealed.clear()
        return tuple(GroupTotals(index, *counts) for index, counts in enumerate(self._totals))

    def _in_order(self, chunks: tuple[ChunkPlan, ...]) -> Iterator[_Turn]:
        """Yield the writes that an engine owes: chunk after chunk, inside a chunk in order of the model."""
        for chunk in chunks:
            for layer_index, wanted in self._wanted.items():
                if tokens := chunk.chunk.intersection(wanted):
                    yield _Turn(layer_index, chunk, tokens)

    def _take_turn(self, layer_index: int, tokens: Range) -> _Turn:
        """Return the turn of a write that holds what is wanted now, and nothing that is wanted later."""
        turn = self._expected
        if turn is None:
            raise EngineFailed(f"wrote layer {layer_index} of tokens {tokens} after the last")
        is_whole = tokens.contains(turn.tokens) and turn.chunk.chunk.contains(tokens)
        if layer_index != turn.layer_index or not is_whole:
            raise EngineFailed(f"wrote layer {layer_index} of tokens {tokens} before {turn}")
        return turn

    def _check_rows(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        group, dtype = self._places[layer_index][0], self._target.produced[layer_index]
        row_bytes = group.num_kv_heads * group.head_dim * dtype.itemsize
        for rows in (keys, values):
            if len(rows) != len(tokens) or rows.nbytes != len(tokens) * row_bytes:
                shape = f"{len(rows)} rows, {rows.nbytes} bytes"
                raise EngineFailed(f"layer {layer_index}: {shape}, not {len(tokens)} of {row_bytes} bytes")

    def _place(self, turn: _Turn, keys: Rows, values: Rows) -> None:
        """Copy the rows of one layer into every planned span that wants them."""
        if self._chunk_spans[0] != turn.chunk.chunk.start:
            self._chunk_spans = (turn.chunk.chunk.start, turn.chunk.spans)
        group, position = self._places[turn.layer_index]
        for span in self._chunk_spans[1]:
            if span.group_index != group.group_index or not span.layers.start <= position < span.layers.stop:
                continue
            first = turn.tokens.start
            rows = slice(span.tokens.start - first, span.tokens.stop - first)
            span = self._placed(span, position)
            self._copy(turn.layer_index, span, keys[rows], values[rows])
            if span.completed_by == turn.layer_index:
                self._complete(span)

    def _placed(self, span: PlannedSpan, position: int) -> PlannedSpan:
        """Return the span where it lies in the slot; its first layer asks the ring for a place."""
        if self._ring is None:
            return span
        if position == span.layers.start:
            self._in_ring[span.group_index] = replace(span, offset=self._ring.open(span))
        return self._in_ring[span.group_index]

    def _copy(self, layer_index: int, span: PlannedSpan, keys: Rows, values: Rows) -> None:
        group, group_layer = self._places[layer_index]
        num_tokens, position = len(span.tokens), group_layer - span.layers.start
        source = self._target.produced[layer_index]
        for within, rows in (
            (key_range(group, num_tokens, position), keys),
            (value_range(group, num_tokens, position), values),
        ):
            offset = span.offset + within.start
            if source is group.dtype:
                self._rows(offset, rows)[...] = rows
            else:
                convert(rows, source, self._target.memory, group.dtype, offset)

    def _rows(self, offset: int, like: Rows) -> NDArray[np.generic]:
        """Return the slot's bytes from `offset` as an array shaped like `like`."""
        flat = np.frombuffer(self._target.memory, dtype=like.dtype, count=like.size, offset=offset)
        return flat.reshape(like.shape)

    def _complete(self, planned: PlannedSpan) -> None:
        start, target = self._target.start, self._target
        found = digest(target.digest, target.memory[planned.offset : planned.offset + planned.length])
        now_ns = self._clock.now_ns()
        span = Span(
            transfer_id=start.transfer_id,
            attempt=start.attempt,
            slot_id=start.slot_id,
            generation=start.generation,
            sequence=self._sequence,
            group_index=planned.group_index,
            layers=planned.layers,
            tokens=planned.tokens,
            offset=start.slot_offset + planned.offset,
            length=planned.length,
            digest=found,
            written_ns=now_ns,
            sealed_ns=now_ns,
        )
        self._sequence += 1
        self._count(span)
        if self._ring is not None:
            self._ring.sealed(span.sequence, planned)
        if start.mode is TransferMode.STREAM or self._ring is not None:
            target.seal(span)
        else:
            self._unsealed.append(span)

    def _count(self, span: Span) -> None:
        counts = self._totals[span.group_index]
        counts[0] += 1
        counts[1] += span.length
        counts[2] += len(span.layers) * len(span.tokens)
