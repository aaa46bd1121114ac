"""Jobs of all sessions on the one thread of the engine."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.errors import EngineFailed, InvariantViolation
from common.kv.ranges import Range
from common.session.messages import PrefillDone, PrefillFailed
from prefill_service.engine_loop import EngineLoop
from prefill_service.job import Job
from prefill_service.queue import JobQueue
from tests.support.clock import ManualClock
from tests.support.fakes import PatternEngine
from tests.support.prefill_peers import PeerDesk, make_engine, make_peer_desk, turns
from tests.support.sessions import GRANULARITY

pytestmark = pytest.mark.usefixtures("leak_check")

LONG_S = 20.0
"""Longest time an end may take to come; it takes milliseconds."""


class Bench:
    """An engine loop with two sessions; its engine can be held at a layer."""

    def __init__(self, first: PeerDesk, second: PeerDesk, queue: JobQueue[Job]) -> None:
        self.first, self.second = first, second
        self.engine: PatternEngine = make_engine()
        self.loop = EngineLoop(self.engine, GRANULARITY, queue, ManualClock())
        self.entered, self.may_go = asyncio.Event(), threading.Event()
        self.num_idle = 0
        self.on_idle: Exception | None = None
        self.task = asyncio.create_task(self.loop.run(self._note_idle))

    def _note_idle(self) -> None:
        self.num_idle += 1
        if self.on_idle is not None:
            raise self.on_idle

    def hold(self) -> None:
        """Stop the engine at its next layer until `may_go` is set."""
        loop = asyncio.get_running_loop()

        def on_layer(chunk: Range, layer: int) -> None:
            loop.call_soon_threadsafe(self.entered.set)
            self.may_go.wait()

        self.engine.on_layer = on_layer

    async def stop(self) -> None:
        """Cancel the loop; raises what ended it before."""
        self.may_go.set()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def make_bench(slab_dir: Path) -> AsyncIterator[Bench]:
    """Yield an idle bench; everything ends with it."""
    queue: JobQueue[Job] = JobQueue()
    with make_peer_desk(slab_dir, queue, 1) as first, make_peer_desk(slab_dir, queue, 2) as second:
        bench = Bench(first, second, queue)
        await first.greet()
        await second.greet()
        yield bench
        first.peer.close()
        second.peer.close()
        await bench.stop()
        assert (len(first.idle), len(second.idle)) == (1, 1)


async def test_jobs_of_two_sessions_run_one_after_another(slab_dir: Path) -> None:
    """Equal transfer ids of two sessions are two jobs; each peer hears of its own."""
    async with make_bench(slab_dir) as bench:
        await bench.first.start()
        await bench.second.start()

        for desk in (bench.first, bench.second):
            assert isinstance((await desk.said(7))[-1], PrefillDone)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("seven by none"), "engine failed: ZeroDivisionError"),
        (StopIteration("no more"), "engine failed: RuntimeError"),
    ],
    ids=["error", "StopIteration"],
)
async def test_whatever_an_engine_raises_fails_that_job_alone(
    slab_dir: Path, caplog: pytest.LogCaptureFixture, error: Exception, text: str
) -> None:
    """Decode is told its type, the log has its text, and the next job runs."""
    caplog.set_level(logging.CRITICAL)
    async with make_bench(slab_dir) as bench:

        def on_layer(chunk: Range, layer: int) -> None:
            bench.engine.on_layer = lambda chunk, layer: None
            raise error

        bench.engine.on_layer = on_layer
        await bench.first.start()
        await bench.second.start()

        async with asyncio.timeout(LONG_S):
            (failed,) = await bench.first.said(1)
            done = (await bench.second.said(7))[-1]
        assert isinstance(failed, PrefillFailed)
        assert failed.reason == EngineFailed.code
        assert text in failed.message
        assert isinstance(done, PrefillDone)


async def test_cancelling_the_loop_tells_the_engine_to_stop(slab_dir: Path) -> None:
    """Nobody waits for the rest of a long prompt, also while the session is open."""
    async with make_bench(slab_dir) as bench:
        bench.hold()
        await bench.first.start()
        await bench.entered.wait()

        bench.task.cancel()
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, bench.may_go.set)
        with pytest.raises(asyncio.CancelledError):
            await bench.task

        assert isinstance((await bench.first.said(2))[-1], PrefillFailed)


async def test_an_invariant_violation_ends_the_loop(slab_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Our own bug is not one job's failure: the service stops, and the peer still hears the end."""
    caplog.set_level(logging.CRITICAL)
    async with make_bench(slab_dir) as bench:

        def on_layer(chunk: Range, layer: int) -> None:
            raise InvariantViolation("a page was lost")

        bench.engine.on_layer = on_layer
        await bench.first.start()

        with pytest.raises(InvariantViolation, match="a page was lost"):
            await bench.task

        assert isinstance((await bench.first.said(1))[0], PrefillFailed)


async def test_nobody_waits_for_jobs_of_a_loop_that_broke(
    slab_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be waited for until the grace is over, and nobody would ever take them."""
    caplog.set_level(logging.CRITICAL)
    async with make_bench(slab_dir) as bench:

        def on_layer(chunk: Range, layer: int) -> None:
            raise InvariantViolation("a page was lost")

        bench.engine.on_layer = on_layer
        await bench.first.start()
        await bench.second.start()
        await bench.loop.wait_idle(60)

        assert not bench.loop.is_idle
        with pytest.raises(InvariantViolation, match="a page was lost"):
            await bench.task


async def test_a_running_job_hears_whether_another_session_waits(slab_dir: Path) -> None:
    """Not of its own session's jobs; and that nobody waits any more."""
    async with make_bench(slab_dir) as bench:
        bench.hold()
        await bench.first.start(21)
        await bench.entered.wait()
        job = bench.loop.running
        assert job is not None

        await bench.first.start(22)
        assert not job.contested.is_set()
        await bench.second.start(21)
        assert job.contested.is_set()
        bench.second.cancel(21)
        assert not job.contested.is_set()

        bench.may_go.set()
        await bench.loop.wait_idle(60)


async def test_a_job_hears_at_its_start_that_another_session_waits(slab_dir: Path) -> None:
    """It came while another was computed; the last one of all hears that nobody waits."""
    async with make_bench(slab_dir) as bench:
        seen: dict[tuple[int, int], bool] = {}

        def on_layer(chunk: Range, layer: int) -> None:
            bench.may_go.wait()
            job = bench.loop.running
            assert job is not None
            seen.setdefault(job.key, job.contested.is_set())

        bench.engine.on_layer = on_layer
        for desk, transfer_id in ((bench.first, 21), (bench.first, 22), (bench.second, 21)):
            await desk.start(transfer_id)
        bench.may_go.set()
        await bench.loop.wait_idle(60)

        assert seen == {(1, 21): True, (2, 21): True, (1, 22): False}


async def test_the_end_of_the_last_job_is_told(slab_dir: Path) -> None:
    """Once, and not while another waits."""
    async with make_bench(slab_dir) as bench:
        bench.hold()
        await bench.first.start()
        await bench.second.start()
        await bench.entered.wait()

        bench.may_go.set()
        await bench.loop.wait_idle(60)
        await turns()

        assert bench.num_idle == 1


async def test_a_check_that_fails_when_idle_ends_the_loop(slab_dir: Path) -> None:
    """An invariant is broken: nothing that the service holds can be trusted."""
    async with make_bench(slab_dir) as bench:
        bench.on_idle = InvariantViolation("a slot was lost")
        await bench.first.start()

        with pytest.raises(InvariantViolation, match="a slot was lost"):
            await bench.task

        assert isinstance((await bench.first.said(7))[-1], PrefillDone)


async def test_waiting_for_idle_ends_when_the_last_job_is_cancelled_in_the_queue(slab_dir: Path) -> None:
    """Nobody waits out the grace for a job that is gone before the engine has taken it."""
    queue: JobQueue[Job] = JobQueue()
    loop = EngineLoop(make_engine(), GRANULARITY, queue, ManualClock())
    with make_peer_desk(slab_dir, queue) as desk:
        await desk.greet()
        await desk.start()
        waiting = asyncio.create_task(loop.wait_idle(2 * LONG_S))
        await turns()
        assert not waiting.done()

        desk.cancel()

        async with asyncio.timeout(LONG_S):
            assert await waiting
        desk.peer.close()


async def test_waiting_for_idle_ends_at_its_limit(slab_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A drain has a grace and no more; what still runs is logged."""
    async with make_bench(slab_dir) as bench:
        bench.hold()
        await bench.first.start()
        await bench.entered.wait()

        await bench.loop.wait_idle(0)

        assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
            "engine.still_busy"
        ]
