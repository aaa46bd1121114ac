"""Packs finished KV into the slot of one transfer and says which spans are final.

Theory of operation: the span plan fixes where every row goes, so a row is copied once, straight from the
attention's output to its place. The mode decides only *when*:

    stream     copy when the layer is done, tell each span when its last layer is done
    deferred   copy when the layer is done, tell everything in `finish`
    whole      keep the arrays, copy and tell everything in `finish`

Ownership: one writer per job, used on the engine's thread. It holds views of the slab until `close`; a
span it has told is never written again (rule 5).

Not here: the cut into spans (`common/kv/plan.py`), the stream (`servicer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.errors import InvariantViolation
from common.kv.digest import DigestKind, digest
from common.kv.geometry import GroupGeometry, KVGeometry
from common.kv.plan import PlannedSpan, SpanPlan
from common.kv.ranges import Range
from common.kv.spans import Span, key_range, value_range
from common.kv.writer import Rows
from common.runtime.clock import Clock
from common.session.messages import GroupTotals, StartPrefill, TransferMode


@dataclass(frozen=True, slots=True)
class SlotTarget:
    """Where a job's KV goes and how it is told."""

    start: StartPrefill
    memory: memoryview
    """The bytes of the slot, writable."""

    digest: DigestKind
    tell: Callable[[Span], None]
    """Called on the engine's thread with each final span."""


class SpanWriter:
    """The `KVWriter` of one transfer."""

    def __init__(self, geometry: KVGeometry, plan: SpanPlan, target: SlotTarget, clock: Clock) -> None:
        if plan.total_bytes > len(target.memory):
            raise InvariantViolation(f"plan has {plan.total_bytes} bytes, slot {len(target.memory)}")
        self._groups = geometry.groups
        self._group_layers = {
            layer: (group, position)
            for group in self._groups
            for position, layer in enumerate(group.layer_indices)
        }
        self._chunks = {chunk.chunk: chunk for chunk in plan.chunks}
        self._num_planned = plan.num_spans
        self._target = target
        self._clock = clock
        self._chunk = Range(0, 0)
        self._chunk_spans: tuple[PlannedSpan, ...] = ()
        # Invariant: _chunk_spans are the planned spans of _chunk.
        self._kept: list[tuple[int, Range, Rows, Rows]] = []
        self._untold: list[Span] = []
        self._totals = [[0, 0, 0] for _ in self._groups]
        self._sequence = 0

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Take the KV of one layer for one chunk; see `KVWriter`."""
        if self._target.start.mode is TransferMode.WHOLE:
            self._kept.append((layer_index, tokens, keys, values))
        else:
            self._place(layer_index, tokens, keys, values)

    def finish(self) -> tuple[GroupTotals, ...]:
        """Write and tell what the mode held back; return the totals that PrefillDone carries.

        Raises: `InvariantViolation` when the engine left out a layer or a chunk.
        """
        for layer_index, tokens, keys, values in self._kept:
            self._place(layer_index, tokens, keys, values)
        self._kept.clear()
        for span in self._untold:
            self._target.tell(replace(span, told_ns=self._clock.now_ns()))
        self._untold.clear()
        if self._sequence != self._num_planned:
            raise InvariantViolation(f"{self._sequence} spans written, {self._num_planned} planned")
        return tuple(GroupTotals(index, *counts) for index, counts in enumerate(self._totals))

    def close(self) -> None:
        """Let go of the slot's memory; nothing can be written afterwards."""
        self._kept.clear()
        self._untold.clear()
        self._target.memory.release()

    def _place(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Copy the rows of one layer into every planned span that wants them."""
        if tokens != self._chunk:
            planned = self._chunks.get(tokens)
            self._chunk, self._chunk_spans = tokens, planned.spans if planned else ()
        group, position = self._group_layers[layer_index]
        for span in self._chunk_spans:
            if span.group_index != group.group_index or not span.layers.start <= position < span.layers.stop:
                continue
            rows = slice(span.tokens.start - tokens.start, span.tokens.stop - tokens.start)
            self._copy(group, span, position - span.layers.start, keys[rows], values[rows])
            if span.completed_by == layer_index:
                self._complete(span)

    def _copy(self, group: GroupGeometry, span: PlannedSpan, position: int, keys: Rows, values: Rows) -> None:
        num_tokens = len(span.tokens)
        for within, rows in (
            (key_range(group, num_tokens, position), keys),
            (value_range(group, num_tokens, position), values),
        ):
            self._rows(span.offset + within.start, rows)[...] = rows

    def _rows(self, offset: int, like: Rows) -> NDArray[np.generic]:
        """Return the slot's bytes from `offset` as an array shaped like `like`."""
        flat = np.frombuffer(self._target.memory, dtype=like.dtype, count=like.size, offset=offset)
        return flat.reshape(like.shape)

    def _complete(self, planned: PlannedSpan) -> None:
        start, target = self._target.start, self._target
        told = digest(target.digest, target.memory[planned.offset : planned.offset + planned.length])
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
            digest=told,
            written_ns=now_ns,
            told_ns=now_ns,
        )
        self._sequence += 1
        self._count(span)
        if start.mode is TransferMode.STREAM:
            target.tell(span)
        else:
            self._untold.append(span)

    def _count(self, span: Span) -> None:
        counts = self._totals[span.group_index]
        counts[0] += 1
        counts[1] += span.length
        counts[2] += len(span.layers) * len(span.tokens)
