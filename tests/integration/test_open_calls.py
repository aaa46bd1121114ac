"""Calls that are many, silent, or over at once keep nobody out and are no errors (row Y27)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.wire import call_limits
from common.wire.channel import make_channel
from common.wire.failure import remote_failure
from decode_service.app import GENERATE, SPARE_CALLS
from kvspan.v1 import decode_pb2 as pb
from tests.integration.conftest import LoadPair, shared_pair
from tests.support.cases import Oracle, prompt_of
from tests.support.pair import Pair, make_configs
from tests.support.wire import is_serving

LANES, QUEUE = 2, 6
NUM_CALLS = LANES + QUEUE + SPARE_CALLS
"""Calls of Generate that may be open."""

PROMPT = prompt_of(70)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running DENSE pair that takes few calls."""
    folder = tmp_path_factory.mktemp("pair")
    configs = make_configs(folder, checkpoints["DENSE"], lanes=LANES, queue_limit=QUEUE)
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


async def reason_of(call: Any) -> str:
    """Return the reason that a call ends with, or its code."""
    try:
        async for _ in call:
            pass
    except grpc.RpcError as error:
        failure = remote_failure(error)
        return failure.reason or failure.code.name
    return "OK"


async def test_calls_that_send_nothing_keep_nobody_out(
    pair: Pair, oracles: Callable[[str], Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there may be stay open, the others are refused; requests, health and status are answered."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(make_channel(pair.decode_address)) for _ in range(3)]
        opened: list[Any] = [channel.stream_stream(GENERATE)() for channel in channels * 100]
        ends = [asyncio.create_task(reason_of(call)) for call in opened]
        while sum(end.done() for end in ends) < len(ends) - NUM_CALLS:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
        refused = Counter(end.result() for end in ends if end.done())
        monkeypatch.setattr(call_limits, "PATIENCE_S", 0.0)

        answer = await pair.ask(PROMPT, 3, route="remote")
        status = await pair.client.status()
        is_healthy = await is_serving(channels[0])
        for call in opened:
            call.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    oracles("DENSE").assert_greedy(PROMPT, answer)
    assert refused == {"CALLS_EXHAUSTED": 300 - NUM_CALLS}
    assert is_healthy
    assert status.lanes_total == LANES


async def test_y27_calls_that_are_over_at_once_are_no_errors(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Y27: 1,000 deadlines of 1 to 5 ms meet every step of a call: no error, no traceback, all counted."""
    caplog.set_level(logging.INFO)
    before = pair.decode.core.counts.submitted
    asked = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=PROMPT)).SerializeToString()
    deadlines_s = itertools.cycle((0.001, 0.002, 0.003, 0.004, 0.005))
    async with make_channel(pair.decode_address) as channel:
        await channel.channel_ready()
        ask: Any = channel.unary_stream(GENERATE)
        for _ in range(125):
            await asyncio.gather(*(reason_of(ask(asked, timeout=next(deadlines_s))) for _ in range(8)))
    await pair.wait_idle()

    loud = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert loud == []
    assert pair.decode.core.counts.submitted > before
