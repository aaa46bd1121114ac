"""Take the KV of a prefill in this process straight into reserved pages.

Theory of operation: the same seam as the span writer of the prefill service (`common/kv/writer.py`), with
pages in the place of a slot. An engine offers every position it computes; those that the request requires
are copied, the others (already held, or out of a window) are dropped.

Ownership: one per prefill, used on the engine's thread. The reservation behind `tables` must outlive it.

Not here: publication, and coverage of what was written; `written` is what coverage is checked with.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import SpanOutOfRange
from common.kv.geometry import KVGeometry
from common.kv.ranges import Range, RangeSet
from common.kv.writer import Rows
from decode_service.cache.storage import Kind, PagedStorage
from decode_service.cache.tables import PageTable


class PageWriter:
    """A `KVWriter` whose rows end in pages."""

    def __init__(
        self,
        storage: PagedStorage,
        geometry: KVGeometry,
        tables: Sequence[PageTable],
        required: Sequence[Range],
    ) -> None:
        self._storage = storage
        self._tables = tuple(tables)
        self._required = tuple(required)
        groups = geometry.groups
        self._places = {
            layer_index: (group.group_index, group_layer)
            for group in groups
            for group_layer, layer_index in enumerate(group.layer_indices)
        }
        self._row_bytes = tuple(group.row_bytes for group in groups)
        self._written = {layer_index: RangeSet() for layer_index in self._places}

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Copy the required positions among `tokens` into their pages.

        Raises SpanOutOfRange for an unknown layer or rows of another size; nothing is copied then.
        """
        if layer_index not in self._places:
            raise SpanOutOfRange("layer_index", layer_index, sorted(self._places))
        group_index, group_layer = self._places[layer_index]
        self._check(tokens, keys, self._row_bytes[group_index])
        self._check(tokens, values, self._row_bytes[group_index])
        wanted = tokens.intersection(self._required[group_index])
        if not len(wanted):
            return
        runs = self._tables[group_index].runs(wanted)
        skipped = wanted.start - tokens.start
        _copy(keys[skipped:], self._storage.rows(group_index, group_layer, Kind.KEYS), runs)
        _copy(values[skipped:], self._storage.rows(group_index, group_layer, Kind.VALUES), runs)
        self._written[layer_index] = self._written[layer_index].with_range(wanted)

    def missing(self) -> tuple[str, ...]:
        """Return the required positions that were not written, as text, per group and group layer."""
        return tuple(
            f"group {group_index} layer {group_layer} tokens {gap}"
            for layer_index, (group_index, group_layer) in self._places.items()
            for gap in self._written[layer_index].missing_from(self._required[group_index])
        )

    def _check(self, tokens: Range, rows: Rows, row_bytes: int) -> None:
        expected = len(tokens) * row_bytes
        if rows.ndim != 3 or len(rows) != len(tokens) or rows.nbytes != expected:
            shape = f"{rows.shape} of {rows.itemsize} bytes"
            raise SpanOutOfRange("rows", shape, f"{len(tokens)} rows of {row_bytes} bytes")


def _copy(rows: Rows, target: Rows, runs: Sequence[Range]) -> None:
    words = target.view(rows.dtype).reshape(len(target), *rows.shape[1:])
    taken = 0
    for run in runs:
        words[run.start : run.stop] = rows[taken : taken + len(run)]
        taken += len(run)
