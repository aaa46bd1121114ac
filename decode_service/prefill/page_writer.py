"""Take the KV of a prefill in this process straight into reserved pages.

Theory of operation: the same seam as the span writer of the prefill service (`common/kv/writer.py`), with
pages in the place of a slot. An engine offers every position it computes; those that the request requires
are copied, the others (already held, or out of a window) are dropped.

Ownership: one per prefill, used on the engine's thread. The reservation behind `tables` must outlive it.

Not here: publication, and coverage of what was written; `written` is what coverage is checked with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.engine.decode import KVPlace, KVStore
from common.errors import SpanOutOfRange
from common.kv.elements import converted
from common.kv.geometry import DType, KVGeometry
from common.kv.ranges import Range, RangeSet
from common.kv.tables import PageTable
from common.kv.writer import Rows


class PageWriter:
    """A `KVWriter` whose rows end in pages."""

    def __init__(
        self,
        store: KVStore,
        geometry: KVGeometry,
        tables: Sequence[PageTable],
        required: Sequence[Range],
        produced: Mapping[int, DType] | None = None,
    ) -> None:
        """`produced` has the element type of the engine by model layer, when it may not be the store's."""
        self._store = store
        self._produced = geometry.dtypes if produced is None else produced
        self._tables = tuple(tables)
        self._required = tuple(required)
        self._places = geometry.by_layer
        self._written = {layer_index: RangeSet() for layer_index in self._places}

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Copy the required positions among `tokens` into their pages.

        Raises SpanOutOfRange for an unknown layer or rows of another size, and EngineFailed for a number that
        does not fit the store's element type; nothing is copied then.
        """
        if layer_index not in self._places:
            raise SpanOutOfRange("layer_index", layer_index, sorted(self._places))
        group, group_layer = self._places[layer_index]
        source = self._produced[layer_index]
        row_bytes = group.num_kv_heads * group.head_dim * source.itemsize
        self._check(tokens, keys, row_bytes)
        self._check(tokens, values, row_bytes)
        wanted = tokens.intersection(self._required[group.group_index])
        if not len(wanted):
            return
        place = KVPlace(group.group_index, self._tables[group.group_index], wanted)
        part = slice(wanted.start - tokens.start, wanted.stop - tokens.start)
        rows = (converted(one[part], source, group.dtype) for one in (keys, values))
        self._store.write(place, group_layer, *rows)
        self._written[layer_index] = self._written[layer_index].with_range(wanted)

    def missing(self) -> tuple[str, ...]:
        """Return the required positions that were not written, as text, per group and group layer."""
        return tuple(
            f"group {group.group_index} layer {group_layer} tokens {gap}"
            for layer_index, (group, group_layer) in self._places.items()
            for gap in self._written[layer_index].missing_from(self._required[group.group_index])
        )

    def _check(self, tokens: Range, rows: Rows, row_bytes: int) -> None:
        expected = len(tokens) * row_bytes
        if rows.ndim != 3 or len(rows) != len(tokens) or rows.nbytes != expected:
            shape = f"{rows.shape} of {rows.itemsize} bytes"
            raise SpanOutOfRange("rows", shape, f"{len(tokens)} rows of {row_bytes} bytes")
