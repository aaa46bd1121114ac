"""Channels reach a server by port or by path, and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from common.errors import ConfigError
from common.wire.channel import make_channel, make_sync_channel
from kvspan.v1 import decode_pb2, decode_pb2_grpc
from tests.support.wire import ScriptedDecode, answer_hello, serving, slow_door


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_both_channels_reach_a_server(kind: str, tmp_path: Path) -> None:
    """The same target works for blocking and for asyncio clients."""
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/x.sock"
    request = decode_pb2.GetStatusRequest()

    def ask(target: str) -> int:
        with make_sync_channel(target) as channel:
            answer = decode_pb2_grpc.DecodeServiceStub(channel).GetStatus(request, timeout=5)
        return int(answer.num_steps)

    async with serving(ScriptedDecode(answer_hello), address) as (_, bound):
        async with make_channel(bound) as channel:
            answer = await decode_pb2_grpc.DecodeServiceStub(channel).GetStatus(request, timeout=5)
        blocking = await asyncio.to_thread(ask, bound)

    assert (answer.num_steps, blocking) == (13, 13)


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_service_that_is_slow_to_take_a_connection_is_waited_for(kind: str) -> None:
    """Y28: how soon a lost service is looked for again is not how long one attempt to connect may take."""
    request, hasty = decode_pb2.GetStatusRequest(), (("grpc.min_reconnect_backoff_ms", 100),)

    async def ask(target: str) -> int:
        async with make_channel(target) as channel:
            answer = await decode_pb2_grpc.DecodeServiceStub(channel).GetStatus(request, timeout=10)
        return int(answer.num_steps)

    def ask_blocking(target: str) -> int:
        with make_sync_channel(target) as channel:
            answer = decode_pb2_grpc.DecodeServiceStub(channel).GetStatus(request, timeout=10)
        return int(answer.num_steps)

    async with (
        serving(ScriptedDecode(answer_hello)) as (_, address),
        slow_door(address) as (door, target),
        grpc.aio.insecure_channel(target, options=hasty) as other,
    ):
        asking = asyncio.create_task(
            ask(target) if kind == "asyncio" else asyncio.to_thread(ask_blocking, target)
        )
        # Whoever allows an attempt a tenth of a second gives up, so that much has passed for us, too.
        with pytest.raises(grpc.aio.AioRpcError):
            await decode_pb2_grpc.DecodeServiceStub(other).GetStatus(request)
        assert not asking.done()
        door.open()

        assert await asking == 13


async def test_service_that_comes_is_found_soon_after_nobody_was_there(tmp_path: Path) -> None:
    """An address without a listener fails a call at once, whatever its time limit; later ones try again."""
    address, request = f"unix:{tmp_path}/x.sock", decode_pb2.GetStatusRequest()
    async with make_channel(address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(request, timeout=3600)
        async with serving(ScriptedDecode(answer_hello), address):
            answer = await stub.GetStatus(request, timeout=15, wait_for_ready=True)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert answer.num_steps == 13


async def test_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy for the internet cannot reach a service on this host."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    async with serving(ScriptedDecode(answer_hello)) as (_, address), make_channel(address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        answer = await stub.GetStatus(decode_pb2.GetStatusRequest(), timeout=5)

    assert answer.num_steps == 13


@pytest.mark.parametrize("make", [make_channel, make_sync_channel])
def test_target_is_refused_when_it_is_no_address(make: Callable[[str], object]) -> None:
    """A wrong target is a wrong setting, and not a peer that is down."""
    with pytest.raises(ConfigError, match=r"^target=nowhere"):
        make("nowhere")
