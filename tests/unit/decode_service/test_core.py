"""The life of a request: admitted, prefilled, published, decoded, given back."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from common.errors import (
    InvariantViolation,
    KVSpanError,
    LeaseExpired,
    PrefillEngineFailed,
    PromptTooLong,
    QueueFull,
)
from common.kv.ranges import Range
from common.runtime.clock import SystemClock
from common.runtime.invariants import watch_callbacks
from common.session.messages import TransferMode
from common.telemetry.timeline import Timeline
from decode_service.attempts import LossPolicy
from decode_service.core import LATE_TOLERANCE_S
from decode_service.generate.answer import FinishReason
from decode_service.request import Request, RequestCounts, Route
from tests.support.decoding import make_request
from tests.support.memory_pair import memory_pair, reader_of
from tests.support.prefill_peers import turns
from tests.support.requests import Gate, counts_of, start

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are part of these tests."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("route", [Route.REMOTE, Route.LOCAL])
async def test_a_request_runs_from_prompt_to_last_token(
    slab_dir: Path, route: Route, mode: TransferMode
) -> None:
    """The same tokens by every route and mode, and everything comes back."""
    async with memory_pair(slab_dir) as pair:
        events = await pair.generate(make_request("abcdefg", route=route, mode=mode))

        assert "".join(event.text for event in events) == "hijk"
        assert events[-1].finish is FinishReason.LENGTH
        assert counts_of(pair) == RequestCounts(submitted=1, finished=1)
        counts = pair.core.counts
        assert (counts.prompts_remote, counts.prompts_local) == ((1, 0) if route is Route.REMOTE else (0, 1))


async def test_every_stage_is_marked(slab_dir: Path) -> None:
    """In order, so that the stages sum to the whole."""
    async with memory_pair(slab_dir) as pair:
        timeline = Timeline(SystemClock().now_ns())
        async for _ in pair.core.generate(reader_of(make_request()), timeline):
            pass

        marks = [
            timeline.arrived_ns,
            timeline.reserved_ns,
            timeline.source_started_ns,
            timeline.source_ended_ns,
            timeline.published_ns,
            timeline.first_token_ns,
            timeline.last_token_ns,
        ]
        assert marks == sorted(marks)
        assert len(timeline.spans) == 4


async def test_more_requests_than_places_run_one_after_another(slab_dir: Path) -> None:
    """Three lanes, two transfers at a time at the peer, and a queue of two."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        tasks = [start(pair, make_request(text)) for text in ("a", "bb", "ccc", "dddd")]
        await gate.entered()
        gate.open()

        assert ["".join(texts) for texts in await asyncio.gather(*tasks)] == ["bcde", "cdef", "defg", "efgh"]
        assert counts_of(pair) == RequestCounts(submitted=4, finished=4)


async def test_a_full_queue_refuses(slab_dir: Path) -> None:
    """H7: Whoever waits keeps its place."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        tasks = [start(pair, make_request()) for _ in range(4)]
        await gate.entered()

        with pytest.raises(QueueFull):
            await pair.generate(make_request())

        gate.open()
        await asyncio.gather(*tasks)
        assert counts_of(pair) == RequestCounts(submitted=5, finished=4, refused=1)


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        (make_request("a" * 41), 40),
        (make_request("a" * 30, max_new_tokens=20), 12),
        (make_request("a" * 41, route=Route.LOCAL), 40),
    ],
    ids=["peer", "pages", "local"],
)
async def test_what_can_never_fit_is_refused_at_once(slab_dir: Path, request_: Request, limit: int) -> None:
    """Before anything is held."""
    async with memory_pair(slab_dir) as pair:
        with pytest.raises(PromptTooLong) as refusal:
            await pair.generate(request_)

        assert refusal.value.limit == limit
        assert counts_of(pair) == RequestCounts(submitted=1, refused=1)
        pair.assert_idle()


async def test_a_failing_engine_fails_its_request_alone(slab_dir: Path) -> None:
    """The reason reaches the client, and the neighbour gets its tokens."""
    async with memory_pair(slab_dir) as pair:

        def on_layer(chunk: Range, layer: int) -> None:
            pair.engine.on_layer = lambda chunk, layer: None
            raise RuntimeError("a device was lost")

        pair.engine.on_layer = on_layer
        broken, whole = start(pair, make_request()), start(pair, make_request())

        with pytest.raises(PrefillEngineFailed, match="RuntimeError"):
            await broken
        assert "".join(await whole) == "defg"
        assert counts_of(pair) == RequestCounts(submitted=2, finished=1, failed=1)


@pytest.mark.parametrize(
    ("breaks", "expected"),
    [
        (False, [("INFO", "request.started"), ("INFO", "request.ended")]),
        (True, [("INFO", "request.started"), ("ERROR", "request.failed"), ("INFO", "request.ended")]),
    ],
)
async def test_the_life_of_a_request_is_logged_under_its_name(
    slab_dir: Path, caplog: pytest.LogCaptureFixture, breaks: bool, expected: list[tuple[str, str]]
) -> None:
    """Begin and end in any case, and an error only where a request was lost."""
    caplog.set_level(logging.INFO, "decode_service.core")
    async with memory_pair(slab_dir) as pair:
        pair.engine.skipped = {1} if breaks else set()
        with suppress(KVSpanError):
            await pair.generate(replace(make_request(), client_request_id="job 7"))

    lines = [record for record in caplog.records if record.name == "decode_service.core"]
    assert [(line.levelname, line.msg) for line in lines] == expected
    assert {vars(line)["fields"]["request_id"] for line in lines} == {"000001"}
    assert vars(lines[0])["fields"]["client_request_id"] == "job 7"
    assert vars(lines[-1])["fields"]["outcome"] == ("failed" if breaks else "finished")


async def test_an_idle_service_finds_a_broken_invariant(
    slab_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All is checked once nothing is live, never beside a request, and a violation ends the service."""
    caplog.set_level(logging.CRITICAL)
    seen: list[InvariantViolation] = []
    loop = asyncio.get_running_loop()
    watch_callbacks(loop, seen.append)
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        held = start(pair, make_request())
        await gate.entered()
        pair.core.counts.refused += 1
        await pair.generate(make_request(route=Route.LOCAL))
        await turns()
        assert seen == []

        gate.open()
        await held
        await turns()
        pair.core.counts.refused -= 1

    assert ["request counts do not add up" in str(violation) for violation in seen] == [True]
    loop.set_exception_handler(None)


async def test_an_idle_service_finds_a_slot_that_nobody_holds(
    slab_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With no request live every lease belongs to a transfer that has not drained; another one leaked."""
    caplog.set_level(logging.CRITICAL)
    seen: list[InvariantViolation] = []
    loop = asyncio.get_running_loop()
    watch_callbacks(loop, seen.append)
    async with memory_pair(slab_dir) as pair:
        slot = pair.peer.last.slots.lease(4096)
        await pair.generate(make_request())
        await turns()
        pair.peer.last.slots.free(slot)

    assert ["1 slots are leased" in str(violation) for violation in seen] == [True]
    loop.set_exception_handler(None)


async def test_a_call_that_ends_with_its_time_limit_has_failed(slab_dir: Path) -> None:
    """The client's library may end it a moment before we do; nobody wished that."""
    async with memory_pair(slab_dir) as pair:
        request = replace(make_request(route=Route.LOCAL), time_limit_s=LATE_TOLERANCE_S)
        responses = pair.begin(request)
        await anext(responses)

        await responses.aclose()

        assert counts_of(pair) == RequestCounts(submitted=1, failed=1)


async def test_a_client_that_does_not_read_holds_no_lane(slab_dir: Path) -> None:
    """Its tokens wait for it; pages and lane go to others when the last is made."""
    async with memory_pair(slab_dir) as pair:
        responses = pair.begin(make_request())
        first = await anext(responses)

        await pair.until_free()

        rest = [event for events in [event async for event in responses] for event in events]
        assert "".join(event.text for event in (*first, *rest)) == "defg"


@pytest.mark.parametrize("error", [RuntimeError("a device was lost"), LeaseExpired("no credit in time")])
@pytest.mark.parametrize("policy", [LossPolicy.RETRY, LossPolicy.LOCAL])
async def test_a_prompt_that_an_engine_fails_at_runs_again(
    slab_dir: Path, policy: LossPolicy, error: Exception
) -> None:
    """An engine that fails is a prefill service that is lost to this prompt."""
    async with memory_pair(slab_dir, policy) as pair:

        def on_layer(chunk: Range, layer: int) -> None:
            pair.engine.on_layer = lambda chunk, layer: None
            raise error

        pair.engine.on_layer = on_layer

        assert "".join(await start(pair, make_request())) == "defg"
        assert counts_of(pair) == RequestCounts(submitted=1, finished=1, retried=1)


async def test_a_prompt_that_every_engine_fails_at_is_tried_a_few_times(slab_dir: Path) -> None:
    """Bounded attempts, and the reason of the last."""
    async with memory_pair(slab_dir, LossPolicy.RETRY) as pair:

        def on_layer(chunk: Range, layer: int) -> None:
            raise RuntimeError("a device was lost")

        pair.engine.on_layer = on_layer

        with pytest.raises(PrefillEngineFailed, match="RuntimeError"):
            await start(pair, make_request())
        assert counts_of(pair) == RequestCounts(submitted=1, failed=1, retried=2)


async def test_a_local_engine_that_leaves_out_a_layer_fails_the_request(slab_dir: Path) -> None:
    """Nothing is published over missing KV, by whichever route."""
    async with memory_pair(slab_dir) as pair:
        pair.local.skipped = {1}

        with pytest.raises(KVSpanError, match="layer 1"):
            await pair.generate(make_request(route=Route.LOCAL))

        assert counts_of(pair) == RequestCounts(submitted=1, failed=1)


async def cancel(task: asyncio.Task[list[str]]) -> None:
    """Cancel a request and see it end."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("route", [Route.REMOTE, Route.LOCAL])
async def test_a_cancel_while_the_prompt_is_computed_ends_at_once(slab_dir: Path, route: Route) -> None:
    """The call does not wait for the engine; pages and slot follow when it has ended."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine if route is Route.REMOTE else pair.local)
        task = start(pair, make_request(route=route))
        await gate.entered()

        await cancel(task)

        assert counts_of(pair) == RequestCounts(submitted=1, cancelled=1)
        assert pair.admission.statistics().num_draining == 1
        gate.open()
        await pair.until_idle()


async def test_a_cancel_in_the_queue_takes_nothing(slab_dir: Path) -> None:
    """A10: Neither a lane nor a place stays behind."""
    async with memory_pair(slab_dir) as pair:
        gate = Gate(pair.engine)
        running = [start(pair, make_request()) for _ in range(2)]
        waiting = start(pair, make_request())
        await gate.entered()

        await cancel(waiting)

        assert pair.admission.statistics().num_queued == 0
        gate.open()
        await asyncio.gather(*running)
        assert counts_of(pair) == RequestCounts(submitted=3, finished=2, cancelled=1)


@pytest.mark.parametrize("is_before_the_grant", [True, False])
async def test_a_cancel_in_the_turn_of_the_grant_gives_everything_back(
    slab_dir: Path, is_before_the_grant: bool
) -> None:
    """The grant comes to a call that is about to end: pages, lane and slot go to the next."""
    async with memory_pair(slab_dir) as pair:
        gate, loop = Gate(pair.engine), asyncio.get_running_loop()
        running = [start(pair, make_request()) for _ in range(2)]
        gone, waiting = start(pair, make_request()), start(pair, make_request())
        await gate.entered()
        assert pair.admission.statistics().num_queued == 2

        pair.journal.on_reserved = (
            gone.cancel if is_before_the_grant else partial(loop.call_soon, gone.cancel)
        )
        gate.open()

        with pytest.raises(asyncio.CancelledError):
            await gone
        assert "".join(await waiting) == "defg"
        await asyncio.gather(*running)
        assert counts_of(pair) == RequestCounts(submitted=4, finished=3, cancelled=1)
        assert pair.core.counts.prompts_remote == 3


async def test_a_client_that_leaves_while_tokens_come_frees_its_lane(slab_dir: Path) -> None:
    """The step loop lets go between two steps."""
    async with memory_pair(slab_dir) as pair:
        tokens = pair.begin(make_request(max_new_tokens=30))
        await anext(tokens)

        await tokens.aclose()

        assert counts_of(pair) == RequestCounts(submitted=1, cancelled=1)
        await pair.until_idle()
        assert len(pair.backend.batches) < 30


async def test_a_request_that_cannot_be_sampled_leaves_nothing(slab_dir: Path) -> None:
    """Also an error of ours between grant and publication gives everything back."""
    async with memory_pair(slab_dir) as pair:
        with pytest.raises(ValueError, match="stop string"):
            await pair.generate(make_request(stop=("",)))

        assert counts_of(pair) == RequestCounts(submitted=1, failed=1)
        await pair.until_idle()
