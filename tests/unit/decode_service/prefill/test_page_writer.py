"""Tests of `decode_service/prefill/page_writer.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.errors import EngineFailed, SpanOutOfRange
from common.kv.geometry import DType
from common.kv.ranges import Range
from common.kv.tables import PageTable
from common.kv.writer import Rows
from decode_service.cache.storage import Kind, PagedStorage
from decode_service.prefill.page_writer import PageWriter
from tests.support.factories import make_hybrid_geometry, paged

GEOMETRY = make_hybrid_geometry()
"""Group 0: layers 0, 1, 3, 4, 6, window 6, 96 bytes a row; group 1: layers 2 and 5, 192 bytes. Pages of 4."""
TABLES = (PageTable(4, 1, (2, 0)), PageTable(4, 0, (6, 3, 4)))
REQUIRED = GEOMETRY.required(0, 11)
"""[6, 11) in group 0, [0, 11) in group 1."""


def make_rows(tokens: Range, words: int, salt: int) -> Rows:
    """Return [tokens, 3 heads, words], every number different."""
    rows = np.arange(tokens.start * 3 * words, tokens.stop * 3 * words, dtype=np.int64)
    return rows.reshape(len(tokens), 3, words) + salt


def make_writer(required: tuple[Range, ...] = REQUIRED) -> tuple[PagedStorage, PageWriter]:
    """Return a storage of 3 and 7 pages and a writer for the tables above."""
    storage = PagedStorage(paged(GEOMETRY), [3, 7])
    return storage, PageWriter(storage, GEOMETRY, TABLES, required)


def held(storage: PagedStorage, group_index: int, group_layer: int, kind: Kind, position: int) -> bytes:
    """Return the bytes in the row of a position."""
    row = TABLES[group_index].row(position)
    return bytes(storage.rows(group_index, group_layer, kind)[row])


def test_rows_end_in_the_page_of_their_position() -> None:
    """Layer 5 is the second of group 1; its rows lie where the table says, keys apart from values."""
    storage, writer = make_writer()
    tokens = Range(0, 11)
    keys, values = make_rows(tokens, 8, 1_000), make_rows(tokens, 8, 5_000)

    writer.write(5, tokens, keys, values)

    for position in tokens:
        assert held(storage, 1, 1, Kind.KEYS, position) == keys[position].tobytes()
        assert held(storage, 1, 1, Kind.VALUES, position) == values[position].tobytes()
    assert not storage.rows(1, 0, Kind.KEYS).any()


def test_positions_that_are_not_required_are_dropped() -> None:
    """A windowed layer is offered every position and keeps what the next token still sees."""
    storage, writer = make_writer()
    tokens = Range(4, 11)
    keys, values = make_rows(tokens, 4, 1_000), make_rows(tokens, 4, 5_000)

    writer.write(3, Range(0, 4), make_rows(Range(0, 4), 4, 0), make_rows(Range(0, 4), 4, 0))
    writer.write(3, tokens, keys, values)

    assert held(storage, 0, 2, Kind.KEYS, 6) == keys[2].tobytes()
    assert held(storage, 0, 2, Kind.VALUES, 10) == values[6].tobytes()
    assert held(storage, 0, 2, Kind.KEYS, 5) == bytes(96)


def test_rows_are_copied_when_they_are_a_strided_view() -> None:
    """Rows that lie apart in the engine's memory are taken as they are."""
    storage, writer = make_writer()
    tokens = Range(0, 11)
    wide = make_rows(tokens, 8, 0).repeat(2, axis=0)

    writer.write(2, tokens, wide[::2], wide[1::2])

    assert held(storage, 1, 0, Kind.KEYS, 9) == wide[18].tobytes()


def test_missing_lists_what_was_not_written() -> None:
    """Coverage is known per layer, as ranges."""
    _, writer = make_writer((Range(6, 6), Range(0, 11)))
    tokens = Range(4, 8)
    rows = make_rows(tokens, 8, 0)

    writer.write(2, tokens, rows, rows)

    assert writer.missing() == (
        "group 1 layer 0 tokens [0, 4)",
        "group 1 layer 0 tokens [8, 11)",
        "group 1 layer 1 tokens [0, 11)",
    )


@pytest.mark.parametrize(
    ("layer_index", "rows"),
    [(7, make_rows(Range(0, 4), 8, 0)), (2, make_rows(Range(0, 4), 4, 0)), (2, make_rows(Range(0, 3), 8, 0))],
)
def test_write_refuses_rows_that_do_not_fit_and_changes_nothing(layer_index: int, rows: Rows) -> None:
    """An unknown layer, another row size or another number of rows is out of range."""
    storage, writer = make_writer()

    with pytest.raises(SpanOutOfRange):
        writer.write(layer_index, Range(0, 4), make_rows(Range(0, 4), 8, 0), rows)

    assert not storage.rows(1, 0, Kind.KEYS).any()


def make_wide_writer() -> tuple[PagedStorage, PageWriter]:
    """Return pages of bfloat16, and a writer for an engine that computes in float32."""
    geometry = replace(
        GEOMETRY, layers=tuple(replace(layer, dtype=DType.BFLOAT16) for layer in GEOMETRY.layers)
    )
    storage = PagedStorage(paged(geometry), [3, 7])
    return storage, PageWriter(storage, geometry, TABLES, REQUIRED, GEOMETRY.dtypes)


def test_numbers_become_those_of_the_pages() -> None:
    """N10: rows of float32 end in pages of bfloat16, rounded, where their positions are."""
    storage, writer = make_wide_writer()
    tokens = Range(4, 11)
    numbers = (np.arange(7 * 3 * 8, dtype=np.float32).reshape(7, 3, 8) + 1) / 8

    writer.write(0, tokens, numbers, -numbers)

    for position in range(6, 11):
        row = numbers[position - 4].ravel()
        for kind, expected in ((Kind.KEYS, row), (Kind.VALUES, -row)):
            bits = np.frombuffer(held(storage, 0, 0, kind, position), np.uint16).astype(np.uint32) << 16
            assert np.array_equal(bits.view(np.float32), expected)


def test_a_number_that_the_pages_do_not_have_is_refused_before_the_copy() -> None:
    """N10: a finite number never becomes infinite."""
    storage, writer = make_wide_writer()
    numbers = np.full((1, 3, 8), np.float32(3.4e38))

    with pytest.raises(EngineFailed, match="do not fit bfloat16"):
        writer.write(0, Range(10, 11), numbers, numbers)

    assert not storage.rows(0, 0, Kind.KEYS).any()
