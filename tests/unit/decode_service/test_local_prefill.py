"""Prompts computed in the decode process: one at a time, and everything given back at their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from common.errors import EngineFailed, KVSpanError
from common.kv.ranges import Range
from common.runtime.clock import SystemClock
from common.telemetry.timeline import Timeline
from decode_service.cache.cache import KVCache
from decode_service.cache.storage import PagedStorage
from decode_service.journaling import DecodeJournal
from decode_service.local_prefill import LocalEngine, LocalPrefill
from decode_service.request import Route
from decode_service.reservation import Holder, Reservation
from tests.support.decoding import GEOMETRY, make_request
from tests.support.fakes import PatternEngine

if TYPE_CHECKING:
    from common.model.prefill import ChunkedPrefill

pytestmark = pytest.mark.usefixtures("leak_check")

NUM_PAGES = 12
LONG_S = 20.0
"""Longest time an end may take to come; it takes milliseconds."""


class Bench:
    """A local engine over a pattern, and the pages its prompts were given."""

    def __init__(self) -> None:
        self.pattern = PatternEngine(GEOMETRY)
        self.freed: list[Reservation] = []
        self._journal = DecodeJournal()
        self._cache = KVCache(GEOMETRY, (NUM_PAGES,))
        storage = PagedStorage(GEOMETRY, (NUM_PAGES,))
        prefill = cast("ChunkedPrefill", self.pattern)
        self.engine = LocalEngine(prefill, GEOMETRY, storage, SystemClock(), self._journal)

    def begin(self, prompt: str = "abc") -> tuple[LocalPrefill, Reservation]:
        """Queue a prompt; its call still holds the pages."""
        request = make_request(prompt, route=Route.LOCAL)
        pages = self._cache.reserve(request.prompt_len, 1)
        reservation = Reservation(pages, self.freed.append)
        self._journal.reservation_made(reservation)
        return self.engine.begin(request, reservation, Timeline(0)), reservation


@asynccontextmanager
async def make_bench() -> AsyncIterator[Bench]:
    """Yield an idle engine; its thread ends with it."""
    bench = Bench()
    yield bench
    await bench.engine.close()


async def test_a_prompt_is_whole_when_its_engine_has_ended() -> None:
    """The seed comes, and only the call holds the pages."""
    async with make_bench() as bench:
        local, reservation = bench.begin()

        await local.wait()

        assert int(local.prove_complete().argmax()) == ord("d")
        assert reservation.holders == {Holder.CLIENT}
        assert bench.engine.backlog_tokens == 0


def raises(error: Exception) -> Callable[[Range, int], None]:
    """Return a hook that breaks a layer."""

    def on_layer(chunk: Range, layer: int) -> None:
        raise error

    return on_layer


@pytest.mark.parametrize("error", [ZeroDivisionError("by none"), StopIteration("by none")], ids=repr)
async def test_whatever_an_engine_raises_ends_its_prompt(error: Exception) -> None:
    """The call hears of it, the pages are let go of, and the next prompt runs."""
    async with make_bench() as bench:
        bench.pattern.on_layer = raises(error)
        local, reservation = bench.begin()

        async with asyncio.timeout(LONG_S):
            with pytest.raises(EngineFailed, match="by none"):
                await local.wait()

        assert reservation.holders == {Holder.CLIENT}
        bench.pattern.on_layer = lambda chunk, layer: None
        await bench.begin()[0].wait()


async def test_a_prompt_whose_engine_left_out_a_layer_is_not_whole() -> None:
    """The engine's word is not enough: every row must have been placed."""
    async with make_bench() as bench:
        bench.pattern.skipped = {1}
        local, _ = bench.begin()

        await local.wait()

        with pytest.raises(KVSpanError, match="layer 1"):
            local.prove_complete()
