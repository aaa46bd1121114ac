"""What a peer said before it ended a stream is heard, and so is why it ended it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.wire.channel import make_channel
from common.wire.responses import WRITE_FAILED, responses_of
from common.wire.server import Server
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1 import transfer_pb2_grpc

NUM_SAID = 50
REFUSED = grpc.StatusCode.FAILED_PRECONDITION


class TalkativePrefill(transfer_pb2_grpc.PrefillServiceServicer):
    """Says all at once and ends the stream, well or with a reason."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code
        self.has_ended = asyncio.Event()

    async def Transfer(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Answer nothing that was asked."""
        for number in range(NUM_SAID):
            await context.write(pb.TransferResponse(pong=pb.Pong(number=number)))
        context.set_code(self._code)
        self.has_ended.set()


class CutOff:
    """A call as grpc.aio leaves it when a write has failed: the peer's status comes a moment later."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code
        self._on_status: Callable[[Any], object] = print

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` at each status."""
        self._on_status = callback

    async def __aiter__(self) -> AsyncIterator[pb.TransferResponse]:
        """Yield one response, then raise the status that was made up."""
        yield pb.TransferResponse(pong=pb.Pong(number=3))
        self._on_status(self)
        asyncio.get_running_loop().call_soon(self._on_status, self)
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, details=WRITE_FAILED)

    async def code(self) -> grpc.StatusCode:
        """Return the status of the peer."""
        return self._code

    async def details(self) -> str:
        """Return the peer's text."""
        return "why"

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Return none."""
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata


async def hear(call: Any) -> tuple[list[int], grpc.StatusCode]:
    """Return what a peer said and the status that it ended with."""
    said: list[int] = []
    responses = responses_of(call)
    try:
        while True:
            said.append((await anext(responses)).pong.number)
    except StopAsyncIteration:
        return said, grpc.StatusCode.OK
    except grpc.RpcError as error:
        return said, error.code()


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, REFUSED])
async def test_what_a_peer_said_before_it_ended_the_stream_is_heard(
    code: grpc.StatusCode, tmp_path: Path
) -> None:
    """A word of ours that meets the closed stream does not lose what has arrived and was not read."""
    server, peer = Server([]), TalkativePrefill(code)
    transfer_pb2_grpc.add_PrefillServiceServicer_to_server(peer, server.grpc)
    address = server.listen(f"unix:{tmp_path}/prefill.sock")
    async with server, make_channel(address) as channel:
        await server.start()
        call = transfer_pb2_grpc.PrefillServiceStub(channel).Transfer()
        await call.write(pb.TransferRequest(ping=pb.Ping(number=1)))
        await peer.has_ended.wait()
        with pytest.raises(grpc.aio.AioRpcError):
            for _ in range(100):
                await call.write(pb.TransferRequest(ping=pb.Ping(number=1)))

        heard = await hear(call)

    assert heard == (list(range(NUM_SAID)), code)


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, REFUSED])
async def test_a_status_that_the_library_made_up_is_none(code: grpc.StatusCode) -> None:
    """A write that failed tells that the call is over; why it is comes with the peer's status."""
    assert await hear(CutOff(code)) == ([3], code)
