"""What a peer sends over a stream of ours, to its end and with the status that it ended with.

Theory of operation: when a peer ends a call while a write of ours is under way, grpc.aio first gives the call
a status of its own making, INTERNAL with the text below, and the peer's status a moment later. A reason that
the peer gave would be lost in between; so such a status is taken for none until the next one comes.

Source: grpc.aio sets the status of a call once more when the peer's arrives, and calls `add_done_callback`'s
functions each time; a version that stops doing so costs `STATUS_S`, and the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc

from common.wire.decoding import require_readable

Response = TypeVar("Response")

STATUS_S = 2.0
"""How long the peer's status is waited for once a write has failed; it comes within one turn of the loop."""

WRITE_FAILED = "Internal error from Core"
"""Details of the status that grpc.aio makes up."""


async def responses_of(call: grpc.aio.StreamStreamCall[Any, Response]) -> AsyncIterator[Response]:
    """Yield every response until the peer ends the stream; raises its status when that is not OK.

    Raises: `RemoteProtocolError` for bytes that are no message.
    """
    statuses = asyncio.Semaphore(0)
    call.add_done_callback(lambda _: statuses.release())
    try:
        # Not `call.read()`: after a write that failed it drops what has arrived and was not read.
        async for response in call:
            yield require_readable(response)
    except grpc.aio.AioRpcError as error:
        if error.details() != WRITE_FAILED:
            raise
        await _require_ok(call, statuses)


async def _require_ok(call: grpc.aio.StreamStreamCall[Any, Any], statuses: asyncio.Semaphore) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STATUS_S):
            await statuses.acquire()  # the one made up
            await statuses.acquire()
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        metadata = (await call.initial_metadata(), await call.trailing_metadata())
        raise grpc.aio.AioRpcError(code, *metadata, details=await call.details())
