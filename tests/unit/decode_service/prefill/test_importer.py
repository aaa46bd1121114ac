"""Copies of spans from a slab into pages."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from mmap import mmap
from pickle import PickleBuffer

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import ChecksumMismatch, EngineFailed, InvariantViolation, KVSpanError
from common.kv.digest import DigestKind, digest
from common.kv.geometry import GroupGeometry
from common.kv.ranges import Range
from common.kv.spans import Span, key_range, span_bytes, value_range
from common.kv.tables import PageTable
from common.runtime.invariants import watch_callbacks
from common.telemetry.timeline import SpanRecord
from decode_service.cache.storage import Kind, PagedStorage
from decode_service.prefill.importer import Importer, ImportJob
from tests.support.clock import ManualClock
from tests.support.factories import make_hybrid_geometry, make_span, paged
from tests.support.fakes import pattern
from tests.support.memories import memfd, punch

pytestmark = pytest.mark.usefixtures("leak_check")

GEOMETRY = paged(make_hybrid_geometry(windows=(6, None, 6, None, 6), head_dim=5))
NUM_PAGES = (5, 7)
TABLES = (PageTable(4, 1, (3, 0, 2)), PageTable(4, 0, (6, 5, 1, 2)))
"""Windowed: positions 4 to 15 in scattered pages; full: 0 to 15 in reversed and adjacent pages."""

GUARD = 0xEE
KIND = DigestKind.XXH3_64


class FragileStorage(PagedStorage):
    """Pages that can become impossible to have."""

    is_broken = False
    is_wrong = False
    refusal: KVSpanError | None = None

    def rows(self, group_index: int, group_layer: int, kind: Kind) -> NDArray[np.uint8]:
        """Return the rows, or raise."""
        if self.is_broken:
            raise MemoryError("no such page")
        if self.refusal is not None:
            raise self.refusal
        if self.is_wrong:
            raise InvariantViolation("a page was lost")
        return super().rows(group_index, group_layer, kind)


class Bench:
    """An importer, its storage filled with guard bytes, and what it said."""

    def __init__(self) -> None:
        self.storage = FragileStorage(GEOMETRY, NUM_PAGES)
        for group in GEOMETRY.groups:
            for layer in range(group.num_layers):
                for kind in Kind:
                    self.storage.rows(group.group_index, layer, kind)[:] = GUARD
        self.importer = Importer(GEOMETRY, self.storage, ManualClock(900))
        self.said: asyncio.Queue[SpanRecord | KVSpanError] = asyncio.Queue()

    def submit(
        self, span: Span, source: bytes | bytearray | mmap, table: PageTable | None = None
    ) -> memoryview:
        """Queue a span whose slab bytes begin `source`; returns the view that the importer has to release."""
        view = memoryview(source)[: span.length]
        table = table or TABLES[span.group_index]
        self.importer.submit(ImportJob(span, view, table, KIND, self.said.put_nowait))
        return view

    def rows(self, group: GroupGeometry, layer: int, kind: Kind, tokens: Range) -> list[bytes]:
        """Return the page rows of positions."""
        pages, table = self.storage.rows(group.group_index, layer, kind), TABLES[group.group_index]
        return [pages[table.row(position)].tobytes() for position in tokens]

    @property
    def num_touched_rows(self) -> int:
        """Rows of any layer that are not all guard bytes."""
        return sum(
            int((self.storage.rows(group.group_index, layer, kind) != GUARD).any(axis=1).sum())
            for group in GEOMETRY.groups
            for layer in range(group.num_layers)
            for kind in Kind
        )


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    """Yield a bench whose thread ends with the context."""
    bench = Bench()
    yield bench
    await asyncio.to_thread(bench.importer.stop)


def make_sealed(
    group: GroupGeometry, layers: Range, tokens: Range, sequence: int = 0
) -> tuple[Span, bytearray]:
    """Return a span sealed truly, and its bytes in the slab: a pattern, and pads of 0x5A."""
    source = bytearray([0x5A]) * span_bytes(group, len(layers), len(tokens))
    for number, layer in enumerate(layers):
        for kind, part in ((Kind.KEYS, key_range), (Kind.VALUES, value_range)):
            at = part(group, len(tokens), number)
            source[at.start : at.stop] = pattern(group, group.layer_indices[layer], kind, tokens).tobytes()
    span = make_span(group, layers, tokens, sequence=sequence, digest=digest(KIND, source))
    return span, source


@pytest.mark.parametrize(
    ("group_index", "layers", "tokens"),
    [
        (0, Range(0, 3), Range(5, 15)),
        (0, Range(1, 2), Range(7, 9)),
        (0, Range(2, 3), Range(15, 16)),
        (1, Range(0, 2), Range(0, 16)),
        (1, Range(1, 2), Range(3, 13)),
        (1, Range(0, 1), Range(8, 12)),
    ],
)
async def test_every_row_lands_where_the_table_says(group_index: int, layers: Range, tokens: Range) -> None:
    """Bit for bit, over page edges and scattered pages, and nothing else is touched."""
    group = GEOMETRY.groups[group_index]
    span, source = make_sealed(group, layers, tokens)
    async with running() as bench:
        bench.submit(span, source)

        record = await bench.said.get()
        assert record == SpanRecord(0, span.length, span.written_ns, span.sealed_ns, 900, 900)
        for layer in layers:
            for kind in Kind:
                expected = pattern(group, group.layer_indices[layer], kind, tokens)
                assert bench.rows(group, layer, kind, tokens) == [row.tobytes() for row in expected]
        assert bench.num_touched_rows == 2 * len(layers) * len(tokens)


async def test_bytes_that_have_another_digest_are_not_copied() -> None:
    """Torn or misplaced bytes fail the transfer, and the next span is imported."""
    group = GEOMETRY.groups[1]
    span, source = make_sealed(group, Range(0, 1), Range(0, 3), sequence=4)
    source[77] ^= 1
    async with running() as bench:
        bench.submit(span, source)
        bench.submit(*make_sealed(group, Range(1, 2), Range(0, 3), sequence=5))

        error = await bench.said.get()
        assert isinstance(error, ChecksumMismatch)
        assert (error.sequence, error.expected) == (4, span.digest.hex())
        assert error.actual == digest(KIND, source).hex()
        assert isinstance(await bench.said.get(), SpanRecord)
        assert bench.num_touched_rows == 2 * 3


async def test_a_span_told_before_it_was_written_is_found() -> None:
    """The digest is of the final bytes, so an order turned round cannot pass (W10)."""
    span, source = make_sealed(GEOMETRY.groups[0], Range(0, 2), Range(6, 11))
    unwritten = bytearray(len(source))
    unwritten[: len(source) // 2] = source[: len(source) // 2]
    async with running() as bench:
        bench.submit(span, unwritten)

        assert isinstance(await bench.said.get(), ChecksumMismatch)
        assert bench.num_touched_rows == 0


@pytest.mark.parametrize("is_zero", [False, True], ids=["found", "zeros belong there"])
async def test_a_hole_that_a_peer_punches_into_a_sealed_span_is_found(is_zero: bool) -> None:
    """It reads as zeros: the transfer fails, unless zeros are what was sealed, and nothing is lost then."""
    span, source = make_sealed(GEOMETRY.groups[0], Range(0, 2), Range(6, 11))
    if is_zero:
        source = bytearray(len(source))
        span = replace(span, digest=digest(KIND, source))
    memory = memfd(4096)
    with mmap(memory, 4096) as slab:
        slab[: len(source)] = source
        punch(memory, 0, 4096)
        os.close(memory)
        async with running() as bench:
            bench.submit(span, slab)

            said = await bench.said.get()

    assert isinstance(said, SpanRecord if is_zero else ChecksumMismatch)


async def test_pads_are_part_of_what_the_digest_covers() -> None:
    """A stray write beside the rows is a stray write."""
    span, source = make_sealed(GEOMETRY.groups[0], Range(0, 2), Range(6, 11))
    at = value_range(GEOMETRY.groups[0], 5, 0).stop
    assert source[at] == 0x5A
    source[at] = 0
    async with running() as bench:
        bench.submit(span, source)

        assert isinstance(await bench.said.get(), ChecksumMismatch)


async def test_spans_are_copied_in_order() -> None:
    """First told, first imported."""
    told = [make_sealed(GEOMETRY.groups[0], Range(0, 1), Range(4 + n, 5 + n), n) for n in range(9)]
    async with running() as bench:
        for span, source in told:
            bench.submit(span, source)

        records = [await bench.said.get() for _ in told]
        assert [record.sequence for record in records if isinstance(record, SpanRecord)] == list(range(9))


async def test_slab_bytes_are_let_go_of_before_the_word() -> None:
    """Whoever hears of the end may unmap the slab."""
    span, source = make_sealed(GEOMETRY.groups[0], Range(0, 1), Range(5, 9))
    async with running() as bench:
        view = bench.submit(span, source)
        await bench.said.get()

        with pytest.raises(ValueError, match="released"):
            view.tobytes()
        source.clear()


def beyond_the_table(bench: Bench, span: Span, source: bytearray) -> memoryview:
    """Import into a table that lacks the last page."""
    return bench.submit(span, source, PageTable(4, 1, (3,)))


def without_storage(bench: Bench, span: Span, source: bytearray) -> memoryview:
    """Import into pages that raise."""
    bench.storage.is_broken = True
    return bench.submit(span, source)


@pytest.mark.parametrize("fault", [beyond_the_table, without_storage])
async def test_a_copy_that_breaks_fails_its_span_alone(
    fault: Callable[[Bench, Span, bytearray], memoryview],
) -> None:
    """The thread lives on, and the slab bytes are let go of."""
    span, source = make_sealed(GEOMETRY.groups[0], Range(0, 2), Range(5, 11), sequence=3)
    async with running() as bench:
        view = fault(bench, span, source)

        error = await bench.said.get()
        assert isinstance(error, EngineFailed)
        assert "span 3" in str(error)
        with pytest.raises(ValueError, match="released"):
            view.tobytes()
        bench.storage.is_broken = False
        bench.submit(span, source)
        assert isinstance(await bench.said.get(), SpanRecord)


async def test_what_a_store_has_against_rows_is_said_as_it_is() -> None:
    """In its own words, and without the frames, which hold bytes of the slab."""
    span, source = make_sealed(GEOMETRY.groups[0], Range(0, 2), Range(5, 11), sequence=3)
    async with running() as bench:
        bench.storage.refusal = EngineFailed("row 7 is not the pattern")
        view = bench.submit(span, source)

        said = await bench.said.get()

        assert said is bench.storage.refusal
        assert said.__traceback__ is None
        with pytest.raises(ValueError, match="released"):
            view.tobytes()


async def test_stopping_ends_after_what_is_queued() -> None:
    """Every job is answered exactly once, also at the end of the service."""
    async with running() as bench:
        for number in range(5):
            bench.submit(*make_sealed(GEOMETRY.groups[1], Range(0, 1), Range(number, number + 1), number))

    assert [(await bench.said.get()).__class__ for _ in range(5)] == [SpanRecord] * 5
    assert bench.said.empty()


@pytest.fixture
async def violations(caplog: pytest.LogCaptureFixture) -> asyncio.Queue[InvariantViolation]:
    """What the service is told."""
    caplog.set_level(logging.CRITICAL)
    seen: asyncio.Queue[InvariantViolation] = asyncio.Queue()
    watch_callbacks(asyncio.get_running_loop(), seen.put_nowait)
    return seen


async def test_a_broken_invariant_fails_the_span_and_reaches_the_service(
    violations: asyncio.Queue[InvariantViolation],
) -> None:
    """Our own bug is no failure of one copy."""
    span, source = make_sealed(GEOMETRY.groups[0], Range(0, 2), Range(5, 11), sequence=3)
    async with running() as bench:
        bench.storage.is_wrong = True
        bench.submit(span, source)

        assert isinstance(await bench.said.get(), EngineFailed)
        assert str(await violations.get()) == "a page was lost"


async def test_a_thread_that_breaks_reaches_the_service(
    violations: asyncio.Queue[InvariantViolation],
) -> None:
    """Else every later request would wait for its deadline."""
    span, source = make_sealed(GEOMETRY.groups[0], Range(0, 2), Range(5, 11), sequence=3)
    async with running() as bench:
        view = memoryview(source)
        user = PickleBuffer(view)
        bench.importer.submit(ImportJob(span, view, TABLES[0], KIND, bench.said.put_nowait))

        assert "importer broke: BufferError" in str(await violations.get())
        user.release()
