"""Tests of `decode_service/cache/storage.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.kv.geometry import DType
from decode_service.cache.storage import Kind, PagedStorage
from tests.support.factories import make_geometry, make_hybrid_geometry, paged


def test_rows_and_tensors_are_the_same_memory() -> None:
    """What an importer writes as bytes, attention reads as numbers."""
    storage = PagedStorage(paged(make_geometry(dtype=DType.FLOAT32)), [5])
    row = np.arange(3 * 8, dtype=np.float32)

    storage.rows(0, 1, Kind.VALUES)[7] = row.view(np.uint8)

    keys, values = storage.key_value(0, 1)
    assert values.shape == (5 * 4, 3, 8)
    assert torch.equal(values[7].flatten(), torch.from_numpy(row))
    assert keys.count_nonzero() == 0
    assert storage.key_value(0, 0)[1].count_nonzero() == 0


@pytest.mark.parametrize("dtype", list(DType))
def test_rows_have_the_bytes_of_the_group(dtype: DType) -> None:
    """One row holds the keys, or the values, of one token in one layer."""
    geometry = make_geometry(dtype=dtype)

    rows = PagedStorage(paged(geometry), [5]).rows(0, 0, Kind.KEYS)

    assert rows.shape == (5 * 4, geometry.groups[0].row_bytes)
    assert rows.flags.writeable


def test_groups_have_pages_of_their_own() -> None:
    """Each group has its own number of pages and its own row size."""
    storage = PagedStorage(paged(make_hybrid_geometry()), [3, 7])

    assert storage.rows(0, 4, Kind.VALUES).shape == (3 * 4, 96)
    assert storage.rows(1, 1, Kind.VALUES).shape == (7 * 4, 192)


@pytest.mark.parametrize("num_pages", [[3], [3, 0], [3, 7, 2]])
def test_construction_refuses_a_group_without_pages(num_pages: list[int]) -> None:
    """Every group needs a page, and there are as many numbers as groups."""
    with pytest.raises(ValueError, match="2 groups"):
        PagedStorage(paged(make_hybrid_geometry()), num_pages)
