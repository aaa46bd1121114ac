"""Whether a service works is asked by the standard protocol."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from common.wire.channel import make_channel
from common.wire.failure import RemoteFailure
from common.wire.health import is_serving, wait_until_serving
from common.wire.server import make_server
from tests.support.wire import DECODE_SERVICE, ScriptedDecode, answer_hello, serving


async def test_service_works_by_its_own_name_and_for_the_whole_process() -> None:
    """Both names are known."""
    async with serving(ScriptedDecode(answer_hello)) as (_, address), make_channel(address) as channel:
        assert await is_serving(channel)
        assert await is_serving(channel, DECODE_SERVICE)


async def test_question_fails_when_the_service_is_not_known_there() -> None:
    """A wrong name is an error and not a service that is down."""
    async with serving(ScriptedDecode(answer_hello)) as (_, address), make_channel(address) as channel:
        with pytest.raises(RemoteFailure) as caught:
            await is_serving(channel, "kvspan.v1.PrefillService")

    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_waiting_ends_when_the_service_says_that_it_works() -> None:
    """A client may start before the model is loaded."""
    async with make_server([DECODE_SERVICE]) as server:
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            waiting = asyncio.create_task(wait_until_serving(channel, DECODE_SERVICE, time_limit_s=5))
            assert not await is_serving(channel, DECODE_SERVICE)
            assert not waiting.done()
            await server.mark_serving()

            await waiting


async def test_waiting_fails_when_the_service_does_not_work_in_time() -> None:
    """A wait has a bound, and says that it was reached."""
    async with make_server([DECODE_SERVICE]) as server:
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            with pytest.raises(RemoteFailure) as caught:
                await wait_until_serving(channel, time_limit_s=0.2)

    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
