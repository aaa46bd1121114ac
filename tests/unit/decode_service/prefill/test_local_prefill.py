"""Prompts computed in the decode process: one at a time, and everything given back at their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.errors import Cancelled, EngineFailed, KVSpanError
from common.kv.ranges import Range
from common.runtime.clock import SystemClock
from common.session.messages import TransferMode
from common.telemetry.timeline import Timeline
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation
from decode_service.cache.storage import PagedStorage
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.local_prefill import LocalEngine, LocalPrefill
from decode_service.request import Route
from tests.support.decoding import GEOMETRY, make_request
from tests.support.fakes import PatternEngine
from tests.support.prefill_peers import turns
from tests.support.requests import Gate

pytestmark = pytest.mark.usefixtures("leak_check")

NUM_PAGES = 12
LONG_S = 20.0
"""Longest time an end may take to come; it takes milliseconds."""


class Bench:
    """A local engine over a pattern, and the pages its prompts were given."""

    def __init__(self) -> None:
        self.pattern = PatternEngine(GEOMETRY)
        self.freed: list[Reservation] = []
        self.backlogs: list[int] = []
        """What was left whenever something changed."""

        self._journal = DecodeJournal()
        self._cache = KVCache(GEOMETRY, (NUM_PAGES,))
        storage = PagedStorage(GEOMETRY, (NUM_PAGES,))
        self.engine = LocalEngine(
            self.pattern, storage, GEOMETRY, SystemClock(), self._journal, self.note_change
        )

    def note_change(self) -> None:
        """A prompt has ended."""
        self.backlogs.append(self.engine.backlog_tokens)

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


async def test_a_prompt_that_has_ended_is_told_with_the_backlog_that_is_left() -> None:
    """Where the next prompt is computed depends on it."""
    async with make_bench() as bench:
        first, second = bench.begin("abc")[0], bench.begin("abcde")[0]

        await first.wait()
        await second.wait()

        assert bench.backlogs == [5, 0]


@pytest.mark.parametrize(("prompt_len", "is_refused"), [(64, False), (65, True)])
async def test_a_prompt_beyond_the_engine_is_refused_with_both_numbers(
    prompt_len: int, is_refused: bool
) -> None:
    """The one thing that this process can never do."""
    async with make_bench() as bench:
        refusal = bench.engine.refusal(prompt_len, TransferMode.DEFERRED)

        assert (refusal is not None) is is_refused
        if refusal:
            assert (refusal.limit_name, refusal.needed, refusal.limit) == ("prompt tokens", 65, 64)


def raises(error: Exception) -> Callable[[Range, int], None]:
    """Return a hook that breaks a layer."""

    def on_layer(chunk: Range, layer: int) -> None:
        raise error

    return on_layer


@pytest.mark.parametrize("error", [ZeroDivisionError("by none"), StopIteration("by none")], ids=repr)
async def test_whatever_an_engine_raises_ends_its_prompt(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The call hears its type and the log its text; the pages are let go of, and the next prompt runs."""
    async with make_bench() as bench:
        bench.pattern.on_layer = raises(error)
        local, reservation = bench.begin()

        async with asyncio.timeout(LONG_S):
            with pytest.raises(EngineFailed) as failed:
                await local.wait()

        assert str(failed.value) in ("engine failed: ZeroDivisionError", "engine failed: RuntimeError")
        assert ["000001" in str(vars(record)["fields"]) for record in caplog.records] == [True]
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


async def test_a_queued_prompt_that_is_given_up_ends_before_the_one_that_runs() -> None:
    """Lane and pages are not kept until the engine has come to it; the running one is not touched."""
    async with make_bench() as bench:
        gate = Gate(bench.pattern)
        running, _ = bench.begin("abc")
        queued, reservation = bench.begin("defg")
        await gate.entered()

        queued.abort(Cancelled("by the client"))
        async with asyncio.timeout(LONG_S):
            with pytest.raises(Cancelled):
                await queued.wait()

        assert reservation.holders == {Holder.CLIENT}
        assert bench.engine.backlog_tokens == 3
        gate.open()
        await running.wait()
        assert int(running.prove_complete().argmax()) == ord("d")


async def test_a_running_prompt_that_is_given_up_holds_its_pages_until_the_engine_has_ended() -> None:
    """Rule 4: until then it writes."""
    async with make_bench() as bench:
        gate = Gate(bench.pattern)
        running, reservation = bench.begin()
        await gate.entered()

        running.abort(Cancelled("by the client"))
        reservation.drop(Holder.CLIENT)
        await turns()
        assert reservation.holders == {Holder.ENGINE}
        gate.open()

        with pytest.raises(Cancelled):
            await running.wait()
        assert bench.freed == [reservation]


async def test_giving_up_a_prompt_that_has_ended_changes_nothing() -> None:
    """A cancel may meet the end."""
    async with make_bench() as bench:
        local, reservation = bench.begin()
        await local.wait()

        local.abort(Cancelled("by the client"))

        assert int(local.prove_complete().argmax()) == ord("d")
        assert reservation.holders == {Holder.CLIENT}


async def test_closing_takes_back_what_is_queued_and_stops_what_runs() -> None:
    """The pages of both are free before the thread's owner goes on."""
    async with make_bench() as bench:
        gate = Gate(bench.pattern)
        prompts = [bench.begin(), bench.begin()]
        await gate.entered()
        for _, reservation in prompts:
            reservation.drop(Holder.CLIENT)

        closing = asyncio.create_task(bench.engine.close())
        await turns()
        assert bench.freed == [prompts[1][1]]
        gate.open()
        await closing

        assert bench.freed == [prompts[1][1], prompts[0][1]]
