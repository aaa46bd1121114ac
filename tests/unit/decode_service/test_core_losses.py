"""What becomes of requests whose prefill service is lost, drains or breaks an invariant."""

import asyncio
import logging
from pathlib import Path

import pytest

from common.errors import (
    EngineFailed,
    InvariantViolation,
    PeerLost,
    PeerUnavailable,
    ShuttingDown,
)
from common.kv.ranges import Range
from common.runtime.invariants import watch_callbacks
from decode_service.core import LossPolicy, RequestCounts
from decode_service.request import Route
from tests.support.decoding import make_request
from tests.support.memory_pair import memory_pair
from tests.support.requests import Gate, counts_of, start

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are part of these tests."""
    caplog.set_level(logging.CRITICAL)


async def test_a_lost_peer_fails_what_it_computes_and_what_waits_for_it(slab_dir: Path) -> None:
    """By default the client is told to try again; a new session serves the next request."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        tasks = [start(pair, make_request()) for _ in range(3)]
        await gate.entered()

        pair.cut()

        for task in tasks:
            with pytest.raises(PeerLost):
                await task
        with pytest.raises(PeerUnavailable):
            await pair.generate(make_request())
        gate.open()
        await pair.connect()
        assert len(await pair.generate(make_request())) == 4
        assert counts_of(pair) == RequestCounts(submitted=5, finished=1, failed=2, refused=2)


async def test_a_lost_peer_does_not_touch_what_is_decoding(slab_dir: Path) -> None:
    """Published pages are the sequence's (H6)."""
    async with memory_pair(slab_dir) as pair:
        tokens = pair.begin(make_request(max_new_tokens=6))
        events = await anext(tokens)

        pair.cut()

        async for more in tokens:
            events += more
        assert "".join(event.text for event in events) == "defghi"


@pytest.mark.parametrize("policy", [LossPolicy.LOCAL, LossPolicy.RETRY])
async def test_a_lost_request_runs_again_when_the_policy_says_so(slab_dir: Path, policy: LossPolicy) -> None:
    """With the same tokens, and no token twice."""
    async with memory_pair(slab_dir, policy) as pair:
        gate = Gate(pair.engine)
        task = start(pair, make_request())
        await gate.entered()

        pair.cut()
        gate.open()
        if policy is LossPolicy.RETRY:
            await pair.connect()

        assert "".join(await task) == "defg"
        assert counts_of(pair) == RequestCounts(submitted=1, finished=1, retried=1)


async def test_a_draining_service_refuses_new_requests_and_ends_the_old(slab_dir: Path) -> None:
    """Idle comes when the last one has ended."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        task = start(pair, make_request())
        await gate.entered()
        pair.core.shut_down()

        with pytest.raises(ShuttingDown):
            await pair.generate(make_request())

        assert not await pair.core.wait_idle(0)
        gate.open()
        assert await pair.core.wait_idle(60)
        assert "".join(await task) == "defg"
        assert counts_of(pair) == RequestCounts(submitted=2, finished=1, refused=1)


async def test_a_request_that_a_draining_peer_refuses_may_be_tried_again(slab_dir: Path) -> None:
    """The peer takes nothing new; what it computes already may end."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        running = start(pair, make_request())
        await gate.entered()
        pair.leave_upon_start()

        with pytest.raises(PeerUnavailable, match="shutting down"):
            await pair.generate(make_request())
        with pytest.raises(PeerUnavailable, match="no prefill service"):
            await pair.generate(make_request())

        gate.open()
        assert "".join(await running) == "defg"


@pytest.mark.parametrize("policy", [LossPolicy.LOCAL, LossPolicy.RETRY])
async def test_a_request_that_a_draining_peer_refuses_runs_elsewhere(
    slab_dir: Path, policy: LossPolicy
) -> None:
    """Never again in the session that drains."""
    async with memory_pair(slab_dir, policy) as pair:
        pair.leave_upon_start()
        pair.changed.clear()
        task = start(pair, make_request())
        await pair.changed.wait()
        assert pair.peer.last.is_leaving
        if policy is LossPolicy.RETRY:
            pair.cut()
            await pair.connect()

        assert "".join(await task) == "defg"
        assert counts_of(pair) == RequestCounts(submitted=1, finished=1, retried=1)


async def test_a_grant_of_a_session_that_has_just_ended_is_a_loss(slab_dir: Path) -> None:
    """The request runs again like any other whose prefill service was lost."""
    async with memory_pair(slab_dir, LossPolicy.RETRY) as pair:
        gate, loop = Gate(pair.engine), asyncio.get_running_loop()
        tasks = [start(pair, make_request()) for _ in range(3)]
        await gate.entered()
        cut = asyncio.Event()

        def on_reserved() -> None:
            pair.journal.on_reserved = lambda: None
            loop.call_soon(pair.cut)
            loop.call_soon(cut.set)

        pair.journal.on_reserved = on_reserved
        gate.open()
        await cut.wait()
        await pair.connect()

        assert ["".join(await task) for task in tasks] == ["defg"] * 3


async def test_a_broken_invariant_of_the_local_engine_reaches_the_service(slab_dir: Path) -> None:
    """Also when the client is gone: our own bug is no failure of one prompt."""
    async with memory_pair(slab_dir) as pair:
        seen: asyncio.Queue[InvariantViolation] = asyncio.Queue()
        watch_callbacks(asyncio.get_running_loop(), seen.put_nowait)

        def on_layer(chunk: Range, layer: int) -> None:
            raise InvariantViolation("a page was lost")

        pair.local.on_layer = on_layer
        with pytest.raises(EngineFailed, match="InvariantViolation"):
            await pair.generate(make_request(route=Route.LOCAL))

        assert str(await seen.get()) == "a page was lost"
