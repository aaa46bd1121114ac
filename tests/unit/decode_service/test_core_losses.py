"""What becomes of requests whose prefill service is lost, drains or breaks an invariant."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

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
from decode_service import attempts
from decode_service.attempts import LossPolicy
from decode_service.prefill.remote_place import RemotePlace
from decode_service.request import RequestCounts, Route
from tests.support.decoding import make_request
from tests.support.memory_pair import MemoryPair, memory_pair
from tests.support.prefill_peers import turns
from tests.support.requests import Gate, counts_of, start

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are part of these tests."""
    caplog.set_level(logging.CRITICAL)


async def test_the_loss_of_the_only_peer_fails_what_it_computes_and_what_waits(slab_dir: Path) -> None:
    """By default the client is told to try again; a new session serves the next request."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        tasks = [start(pair, make_request()) for _ in range(3)]
        await gate.entered()

        pair.cut()

        for task in tasks[:2]:
            with pytest.raises(PeerLost):
                await task
        with pytest.raises(PeerUnavailable):
            await tasks[2]
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

        for _ in range(2):
            with pytest.raises(PeerUnavailable, match="SHUTTING_DOWN"):
                await pair.generate(make_request())

        gate.open()
        assert "".join(await running) == "defg"


async def test_a_request_that_a_peer_turns_away_goes_to_another_one(slab_dir: Path) -> None:
    """Nothing of it was computed, so it has lost nothing, whatever the policy is."""
    async with memory_pair(slab_dir, num_peers=2) as pair:
        pair.leave_upon_start()

        assert "".join(await start(pair, make_request())) == "defg"
        assert counts_of(pair) == RequestCounts(submitted=1, finished=1, retried=1)


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


@pytest.mark.parametrize("end", [MemoryPair.cut, MemoryPair.leave], ids=["lost", "leaves"])
async def test_a_peer_takes_only_what_it_was_working_on(
    slab_dir: Path, end: Callable[[MemoryPair, int], None]
) -> None:
    """Whoever waits for a lane or a slot goes to another peer, whatever the policy is."""
    async with memory_pair(slab_dir, num_peers=2) as pair:
        gate = Gate(pair.engine)
        running = [start(pair, make_request()) for _ in range(3)]
        await gate.entered()
        waiting = [start(pair, make_request(text)) for text in ("b", "c")]
        await turns()
        assert pair.admission.statistics().num_queued == 2

        end(pair, 0)
        gate.open()

        assert ["".join(await task) for task in waiting] == ["cdef", "defg"]
        ends = await asyncio.gather(*running, return_exceptions=True)
        num_lost = sum(isinstance(one, PeerLost) for one in ends)
        assert num_lost == (2 if end is MemoryPair.cut else 0)
        assert counts_of(pair) == RequestCounts(submitted=5, finished=5 - num_lost, failed=num_lost)


async def test_auto_that_waits_goes_on_in_this_process_when_the_last_peer_is_lost(slab_dir: Path) -> None:
    """What was computed there is lost, and nothing else."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        running = [start(pair, make_request(route=Route.AUTO)) for _ in range(2)]
        await gate.entered()
        waiting = start(pair, make_request(route=Route.AUTO))
        await turns()

        pair.cut()

        assert "".join(await waiting) == "defg"
        assert (pair.core.counts.prompts_remote, pair.core.counts.prompts_local) == (2, 1)
        gate.open()
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert [type(one) for one in ends] == [PeerLost] * 2


async def test_a_request_that_waits_keeps_waiting_under_retry_when_the_last_peer_is_lost(
    slab_dir: Path,
) -> None:
    """It has lost nothing but its place in the queue, and that it gets back."""
    async with memory_pair(slab_dir, LossPolicy.RETRY) as pair:
        gate = Gate(pair.engine)
        tasks = [start(pair, make_request()) for _ in range(3)]
        await gate.entered()

        pair.cut()
        gate.open()
        await turns()
        await pair.connect()

        assert ["".join(await task) for task in tasks] == ["defg"] * 3
        assert counts_of(pair) == RequestCounts(submitted=3, finished=3, retried=3)


async def test_a_request_that_waits_fails_under_retry_when_no_peer_comes_back(
    slab_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After REOPEN_WAIT_S, once, with the reasons."""
    monkeypatch.setattr(attempts, "REOPEN_WAIT_S", 0.0)
    async with memory_pair(slab_dir, LossPolicy.RETRY) as pair:
        gate = Gate(pair.engine)
        tasks = [start(pair, make_request()) for _ in range(3)]
        await gate.entered()

        pair.cut()
        gate.open()

        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in ends] == [PeerUnavailable] * 3
        assert counts_of(pair) == RequestCounts(submitted=3, failed=2, refused=1, retried=3)


async def test_a_violation_at_the_begin_is_heard_though_the_call_is_cancelled(
    slab_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the very turn of the grant nobody else would see it, and the service would go on with it."""

    def begin(*_: object) -> NoReturn:
        raise InvariantViolation("begun twice")

    async with memory_pair(slab_dir) as pair:
        gate, loop = Gate(pair.engine), asyncio.get_running_loop()
        running = [start(pair, make_request()) for _ in range(2)]
        gone = start(pair, make_request())
        await gate.entered()

        monkeypatch.setattr(RemotePlace, "begin", begin)
        pair.journal.on_reserved = partial(loop.call_soon, gone.cancel)
        gate.open()

        with pytest.raises(InvariantViolation, match="begun twice"):
            await gone
        await asyncio.gather(*running)


async def test_a_lost_request_runs_again_in_another_session_if_there_is_one(slab_dir: Path) -> None:
    """The engine of the first peer failed at it, and the peer is still there."""
    async with memory_pair(slab_dir, LossPolicy.RETRY, num_peers=2) as pair:
        used: list[list[int]] = []

        def on_layer(chunk: Range, layer: int) -> None:
            used.append([peer.last.slots.num_leased for peer in pair.peers])
            if len(used) == 1:
                raise RuntimeError("a device was lost")

        pair.engine.on_layer = on_layer

        assert "".join(await start(pair, make_request())) == "defg"
        assert (used[0], used[1]) == ([1, 0], [0, 1])


async def test_a_prompt_begins_in_the_turn_of_its_grant(slab_dir: Path) -> None:
    """A session that ends right after takes it along like any other, and it runs again like any other."""
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


class FullPlace(RemotePlace):
    """A place that breaks when a prompt begins."""

    def begin(self, *_: object) -> NoReturn:
        """See `Place`."""
        raise MemoryError("no room for a message")


async def test_a_prompt_that_cannot_begin_fails_alone(slab_dir: Path) -> None:
    """The call that made room for it is not to blame."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        tasks = [start(pair, make_request()) for _ in range(3)]
        await gate.entered()

        pair.peer.put(FullPlace("full", pair.peer.last))
        gate.open()

        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in ends] == [list, list, MemoryError]
        assert counts_of(pair) == RequestCounts(submitted=3, finished=2, failed=1)


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
