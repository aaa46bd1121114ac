"""Channels reach a server by port or by path, and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.wire.channel import make_channel, make_sync_channel
from kvspan.v1 import decode_pb2, decode_pb2_grpc
from tests.support.wire import ScriptedDecode, answer_hello, serving


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
