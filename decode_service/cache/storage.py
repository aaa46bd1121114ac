"""The memory that holds the pages of every group.

Theory of operation: per group one tensor [layers, 2, rows, KV heads, head size], a row being the place of one
token (`common/kv/tables.py`), keys before values. Token-major, so that a run of adjacent pages is a view
both for a plain copy and for attention. All of it is written once at construction: a first touch during an
import would be several times slower than the copy itself.

Ownership: made once by the composition root. The importer and the page writer fill rows through numpy
views; the backend reads and appends through torch views of the same memory. Who may touch a page when is
the business of reservations and lanes, not checked here.

Not here: which page belongs to whom (`common/kv/tables.py` and the pools).

Shapes: R rows (pages x page_tokens), H KV heads, D head size.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.decode import KVPlace
from common.kv.geometry import GroupGeometry
from common.kv.ranges import Range
from common.kv.writer import Rows
from common.model.loader import TORCH_DTYPES
from decode_service.cache.spec import CacheGeometry


class Kind(enum.IntEnum):
    """Which half of the KV; the value is the position in the tensor."""

    KEYS = 0
    VALUES = 1


class PagedStorage:
    """Owns the bytes of every page."""

    def __init__(self, geometry: CacheGeometry, num_pages: Sequence[int]) -> None:
        groups = geometry.groups
        if len(num_pages) != len(groups) or min(num_pages) < 1:
            raise ValueError(f"{len(groups)} groups need a page each at least, got {tuple(num_pages)}")
        self._geometry = geometry
        self._tensors = tuple(
            _touched(group, pages * geometry.page_tokens)
            for group, pages in zip(groups, num_pages, strict=True)
        )
        self._bytes = tuple(_bytes_of(tensor) for tensor in self._tensors)

    @property
    def geometry(self) -> CacheGeometry:
        """Of what is stored."""
        return self._geometry

    def write(self, place: KVPlace, group_layer: int, keys: Rows, values: Rows) -> None:
        """See `KVStore`."""
        runs = place.table.runs(place.tokens)
        _copy(keys, self.rows(place.group_index, group_layer, Kind.KEYS), runs)
        _copy(values, self.rows(place.group_index, group_layer, Kind.VALUES), runs)

    def rows(self, group_index: int, group_layer: int, kind: Kind) -> NDArray[np.uint8]:
        """Return the keys or values of one layer as bytes [R, row_bytes]: a writable view."""
        rows: NDArray[np.uint8] = self._bytes[group_index][group_layer, kind]
        return rows

    def key_value(self, group_index: int, group_layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer [R, H, D]: views."""
        keys_RHD, values_RHD = self._tensors[group_index][group_layer]
        return keys_RHD, values_RHD


def _touched(group: GroupGeometry, num_rows: int) -> Tensor:
    shape = (group.num_layers, 2, num_rows, group.num_kv_heads, group.head_dim)
    return torch.empty(shape, dtype=TORCH_DTYPES[group.dtype]).zero_()


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    layers, kinds, num_rows, *_ = tensor.shape
    array: NDArray[np.uint8] = tensor.view(torch.uint8).view(layers, kinds, num_rows, -1).numpy()
    return array


def _copy(rows: Rows, target: NDArray[np.uint8], runs: Sequence[Range]) -> None:
    """Copy rows in order of their tokens, a run of adjacent pages at a time."""
    words = target.view(rows.dtype).reshape(len(target), *rows.shape[1:])
    taken = 0
    for run in runs:
        words[run.start : run.stop] = rows[taken : taken + len(run)]
        taken += len(run)
