"""Decoding: one thread, one step after another over the active lanes."""

import asyncio
import logging
import platform
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.engine.decode import LaneStep
from common.engine.prefill import Logits
from common.errors import Cancelled, EngineFailed, InvariantViolation
from common.runtime.invariants import watch_callbacks
from decode_service.generate.step_loop import StepLoop
from tests.support.decoding import GEOMETRY, HeldBackend, Lane, make_lane
from tests.support.fakes import CountingBackend

FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Number of the system call, by machine."""

pytestmark = pytest.mark.usefixtures("leak_check")


@asynccontextmanager
async def running(backend: CountingBackend) -> AsyncIterator[StepLoop]:
    """Run a step loop; its thread ends with the context."""
    loop = StepLoop(backend)
    try:
        yield loop
    finally:
        await asyncio.to_thread(loop.stop)


def start(loop: StepLoop, *lanes: Lane) -> None:
    """Hand published sequences to the loop."""
    for lane in lanes:
        loop.start(lane.sequence)


async def test_four_tokens_cost_three_steps() -> None:
    """Nothing that prefill computed is computed again (F5)."""
    backend, lane = CountingBackend(GEOMETRY), make_lane("p", max_new_tokens=4)
    async with running(backend) as loop:
        start(loop, lane)

        assert await lane.tokens() == [*b"pqrs"]
        assert [(step.token_id, step.position) for (step,) in backend.batches] == [
            (ord("p"), 3),
            (ord("q"), 4),
            (ord("r"), 5),
        ]
        assert loop.statistics().num_tokens == 4


async def test_a_step_that_fails_fails_its_lanes_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """The loop goes on with the next sequence; one line names all requests that the step has cost."""
    held, first, second, after = HeldBackend(), make_lane("p"), make_lane("A"), make_lane("a", 2)
    held.failing_steps = {1}
    async with running(held.backend) as loop:
        start(loop, first)
        await held.entered()
        start(loop, second)
        held.let_go(9)
        for lane in (first, second):
            error = await lane.error()
            assert isinstance(error, EngineFailed)
            assert str(error) == "engine failed: decode step: RuntimeError"
            lane.leave()
            assert lane.is_free

        start(loop, after)

        (record,) = [one for one in caplog.records if one.msg == "step.failed"]
        assert vars(record)["fields"]["request_ids"] == ["000001", "000001"]
        assert await after.tokens() == [*b"ab"]
        assert held.batches == ["p", "qA", "a"]


async def test_a_lane_that_fails_alone_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    """Logits of one lane that are no numbers stop no other; the line joins with those of its request."""
    backend, broken, whole = CountingBackend(GEOMETRY), make_lane("p", 9), make_lane("A", 4)
    backend.poisoned = {ord("q")}
    async with running(backend) as loop:
        start(loop, broken, whole)

        assert await whole.tokens() == [*b"ABCD"]
        assert isinstance(await broken.error(), EngineFailed)
        (record,) = caplog.records
        assert (record.msg, vars(record)["fields"]["request_id"]) == ("lane.failed", "000001")
        assert record.exc_info is not None
        broken.leave()
        assert broken.is_free


async def test_stopping_ends_every_sequence() -> None:
    """Active lanes are retired, so that their pages can come back; nobody waits for ever."""
    held, lanes = HeldBackend(), [make_lane("p", 200_000), make_lane("A", 200_000)]
    async with running(held.backend) as loop:
        start(loop, *lanes)
        stopping = asyncio.create_task(asyncio.to_thread(loop.stop))
        # One step at a time, so that the lanes are not through before the thread that stops has its turn.
        while not stopping.done():
            entered = asyncio.create_task(held.entered())
            await asyncio.wait({stopping, entered}, return_when=asyncio.FIRST_COMPLETED)
            held.let_go()
            entered.cancel()

    for lane in lanes:
        assert isinstance(await lane.error(), Cancelled)
        lane.leave()
        assert lane.is_free


class ShortBackend(CountingBackend):
    """A backend that forgets its last lane."""

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """See `DecodeBackend`."""
        return super().step(batch)[:-1]


async def test_a_thread_that_breaks_reaches_the_service(caplog: pytest.LogCaptureFixture) -> None:
    """Else every request would wait for its deadline."""
    caplog.set_level(logging.CRITICAL)
    seen: asyncio.Queue[InvariantViolation] = asyncio.Queue()
    watch_callbacks(asyncio.get_running_loop(), seen.put_nowait)
    async with running(ShortBackend(GEOMETRY)) as loop:
        start(loop, make_lane("p", 3))

        assert "step loop broke: IndexError" in str(await seen.get())


class WrongBackend(CountingBackend):
    """A backend that finds a bug of ours."""

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """See `DecodeBackend`."""
        raise InvariantViolation("page 3 has two owners")


async def test_an_invariant_that_a_step_finds_broken_reaches_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing that the service holds can be trusted then; the lanes of the step fail all the same."""
    caplog.set_level(logging.CRITICAL)
    seen: asyncio.Queue[InvariantViolation] = asyncio.Queue()
    watch_callbacks(asyncio.get_running_loop(), seen.put_nowait)
    lane = make_lane("p", 3)
    async with running(WrongBackend(GEOMETRY)) as loop:
        start(loop, lane)

        assert "page 3 has two owners" in str(await seen.get())
        assert isinstance(await lane.error(), EngineFailed)
        lane.leave()


@pytest.mark.skipif(platform.machine() not in FUTEX, reason="the number of the system call is not known")
async def test_an_idle_loop_sleeps_without_a_time_limit() -> None:
    """Nothing polls: the thread waits in the kernel until something is put into its queue."""
    backend, lane = CountingBackend(GEOMETRY), make_lane("p", 2)
    async with running(backend) as loop:
        start(loop, lane)
        await lane.tokens()

        assert loop.statistics().num_active == 0
        assert await asyncio.to_thread(waits_for_ever, "step-loop")


def waits_for_ever(name: str) -> bool:
    """Tell whether a thread comes to rest in a futex without a time limit, as only an untimed get has."""
    number = FUTEX[platform.machine()]
    thread = next(one for one in threading.enumerate() if one.name == name)
    give_up_s = time.monotonic() + 30
    while time.monotonic() < give_up_s:
        fields = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()
        if fields[0] == number and int(fields[4], 16) == 0:
            return True
        time.sleep(0.001)  # the thread may not have had its turn yet
    return False
