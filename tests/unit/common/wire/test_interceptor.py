"""However a handler ends, its client gets a status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common import errors
from common.wire import interceptor
from common.wire.channel import make_channel
from common.wire.failure import RemoteFailure, from_rpc_error
from common.wire.server import Server
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import decode_pb2_grpc, transfer_pb2_grpc
from tests.support.wire import DECODE_SERVICE, Context, ScriptedDecode, answer_hello, serving


class RaisingDecode(decode_pb2_grpc.DecodeServiceServicer):
    """A decode service whose unary call and whose writing stream raise."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Write one message and raise."""
        await context.write(pb.GenerateResponse(text="first"))
        raise self._error

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:  # noqa: N802
        """Raise."""
        raise self._error


def raising(error: BaseException) -> ScriptedDecode:
    """Return a service whose generator yields one message and raises."""

    async def generate(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="first")
        raise error

    return ScriptedDecode(generate)


async def end_of_stream(servicer: decode_pb2_grpc.DecodeServiceServicer) -> tuple[str, Exception]:
    """Generate; returns the text that arrived and how the call ended."""
    async with Server([DECODE_SERVICE]) as server:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server.grpc)
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(pb.GenerateRequest())
            first = await call.read()
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
    return first.text, from_rpc_error(caught.value)


@pytest.mark.parametrize("make", [raising, RaisingDecode], ids=["generator", "writer"])
async def test_error_becomes_its_status_when_a_stream_has_begun(
    make: type[decode_pb2_grpc.DecodeServiceServicer],
) -> None:
    """What was sent arrives, then the status with its details; never OK."""
    text, error = await end_of_stream(make(errors.ChecksumMismatch(4, "aa", "bb")))  # type: ignore[call-arg]

    assert text == "first"
    assert isinstance(error, RemoteFailure)
    assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "KV_CHECKSUM")


async def test_error_becomes_its_status_when_a_call_is_unary() -> None:
    """A refusal keeps every difference on its way to the client."""
    refusal = errors.SlabNotShared([errors.Difference("slab nonce", "a1", "b2")])
    async with Server([DECODE_SERVICE]) as server:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(RaisingDecode(refusal), server.grpc)
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await decode_pb2_grpc.DecodeServiceStub(channel).GetStatus(pb.GetStatusRequest())

    error = from_rpc_error(caught.value)
    assert isinstance(error, errors.SlabNotShared)
    assert error.differences == refusal.differences


@pytest.mark.parametrize("make", [raising, RaisingDecode], ids=["generator", "writer"])
async def test_unexpected_error_is_internal_and_logged_with_its_traceback(
    make: type[decode_pb2_grpc.DecodeServiceServicer], caplog: pytest.LogCaptureFixture
) -> None:
    """G7: The client learns nothing of an unknown error but that it happened; the log has the rest."""
    with caplog.at_level(logging.ERROR, "common.wire.interceptor"):
        _, error = await end_of_stream(make(ValueError("secret")))  # type: ignore[call-arg]

    assert isinstance(error, RemoteFailure)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL_ERROR")
    assert "secret" not in error.message
    assert [record.exc_info is not None for record in caplog.records if record.message == "call.broken"] == [
        True
    ]


async def test_client_gets_a_status_when_something_inside_the_handler_was_cancelled() -> None:
    """G7: A CancelledError of an inner task would leave the client waiting for ever."""
    _, error = await end_of_stream(raising(asyncio.CancelledError()))

    assert isinstance(error, RemoteFailure)
    assert error.code is grpc.StatusCode.INTERNAL


class Panic(BaseException):
    """As native code raises it: no `Exception`."""


@pytest.mark.parametrize("make", [raising, RaisingDecode], ids=["generator", "writer"])
async def test_a_panic_of_native_code_ends_its_call_and_is_counted(
    make: type[decode_pb2_grpc.DecodeServiceServicer], caplog: pytest.LogCaptureFixture
) -> None:
    """The library would leave such a call open until the deadline of its client."""
    _, error = await end_of_stream(make(Panic("index out of bounds")))  # type: ignore[call-arg]

    assert isinstance(error, RemoteFailure)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL_ERROR")
    (broken,) = [record for record in caplog.records if record.message == "call.broken"]
    assert broken.fields["broken_calls"] == 1  # type: ignore[attr-defined]


async def test_a_call_that_sends_no_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only stays open ends by a limit, one that says it is done ends at once."""
    monkeypatch.setattr(interceptor, "READ_LIMIT_S", 0.1)
    async with serving(ScriptedDecode(answer_hello)) as (_, address), make_channel(address) as channel:
        open_stream: Any = channel.stream_stream(f"/{DECODE_SERVICE}/Generate")
        silent, empty = open_stream(), open_stream()
        await empty.done_writing()
        ends = [await asyncio.wait_for(call.code(), 30) for call in (silent, empty)]

    assert ends == [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT]


async def test_a_call_beyond_the_limit_is_refused_and_health_is_answered() -> None:
    """Before it sent anything, with a reason and a time to come back; the calls that are open go on."""
    async with Server([DECODE_SERVICE], limits={f"/{DECODE_SERVICE}/Generate": 2}) as server:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(ScriptedDecode(answer_hello), server.grpc)
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            open_stream: Any = channel.stream_stream(
                f"/{DECODE_SERVICE}/Generate", pb.GenerateRequest.SerializeToString
            )
            first, second = open_stream(), open_stream()
            await asyncio.gather(first.wait_for_connection(), second.wait_for_connection())
            with pytest.raises(grpc.RpcError) as caught:
                await open_stream().read()
            status = await decode_pb2_grpc.DecodeServiceStub(channel).GetStatus(pb.GetStatusRequest())
            await first.write(pb.GenerateRequest())
            text = [response async for response in first]
            second.cancel()

    error = from_rpc_error(caught.value)
    assert isinstance(error, RemoteFailure)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLS_EXHAUSTED")
    assert error.retry_after_s == 1
    assert (status.num_steps, len(text)) == (13, 2)


async def test_service_is_told_of_a_broken_invariant() -> None:
    """An invariant that does not hold is our own bug: the call fails and the service has to stop."""
    told: list[errors.InvariantViolation] = []
    broken = errors.InvariantViolation("page 3 has two owners")
    async with Server([DECODE_SERVICE], on_invariant=told.append) as server:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(raising(broken), server.grpc)
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                [response async for response in stub.Generate(pb.GenerateRequest())]

    assert told == [broken]
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("text", ["x", "x" * 100_000], ids=["waiting", "writing"])
async def test_handler_ends_when_the_client_cancels(text: str) -> None:
    """A cancelled request frees what it holds at once, also when a message is stuck on its way."""
    ended = asyncio.Event()

    async def generate(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield pb.GenerateResponse(text=text)
            while len(text) > 1:
                yield pb.GenerateResponse(text=text)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(ScriptedDecode(generate)) as (_, address), make_channel(address) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(pb.GenerateRequest())
        await call.read()
        call.cancel()

        async with asyncio.timeout(30):
            await ended.wait()


async def test_handler_ends_when_the_deadline_of_the_client_passes() -> None:
    """A deadline is a cancel that the client need not send."""
    ended = asyncio.Event()

    async def generate(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield pb.GenerateResponse(text="x")
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(ScriptedDecode(generate)) as (_, address), make_channel(address) as channel:
        await channel.channel_ready()
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(pb.GenerateRequest(), timeout=1.5)
        with pytest.raises(grpc.RpcError) as caught:
            [response async for response in call]
        async with asyncio.timeout(30):
            await ended.wait()

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


NO_MESSAGE, NO_TEXT = b"\xff" * 64, b"\x22\x04\x42\x02\xff\xfe"
"""No message at all, and a GenerateRequest whose stop string is no UTF-8."""


@pytest.mark.parametrize(
    ("method", "data"), [("Generate", NO_MESSAGE), ("Generate", NO_TEXT), ("GetStatus", NO_MESSAGE)]
)
async def test_bytes_that_are_no_request_are_refused_with_a_reason(method: str, data: bytes) -> None:
    """The library's own status for them is UNKNOWN, and says nothing that a program can use."""
    async with Server([DECODE_SERVICE]) as server:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(ScriptedDecode(answer_hello), server.grpc)
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            ask: Any = channel.unary_stream(f"/{DECODE_SERVICE}/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                await ask(data).read()

    error = from_rpc_error(caught.value)
    assert isinstance(error, RemoteFailure)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_FIELD_INVALID")
    assert [violation.field for violation in error.violations] == ["request"]


async def test_bytes_that_are_no_message_of_a_stream_end_it_with_a_reason() -> None:
    """The peer broke the protocol, and is told so."""

    class Reader(transfer_pb2_grpc.PrefillServiceServicer):
        async def Transfer(self, request_iterator: object, context: Context) -> None:  # noqa: N802
            await context.read()

    async with Server([]) as server:
        transfer_pb2_grpc.add_PrefillServiceServicer_to_server(Reader(), server.grpc)
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            open_stream: Any = channel.stream_stream("/kvspan.v1.PrefillService/Transfer")
            call = open_stream()
            await call.write(NO_MESSAGE)
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()

    error = from_rpc_error(caught.value)
    assert isinstance(error, RemoteFailure)
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VIOLATION_REMOTE")
    assert "64 bytes" in error.message


class HastyDecode(decode_pb2_grpc.DecodeServiceServicer):
    """A decode service that gives up its first write and raises, as a session does whose other half broke."""

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Begin to write, stop that, and raise."""
        writing = asyncio.create_task(context.write(pb.GenerateResponse(text="first")))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        raise errors.ChecksumMismatch(4, "aa", "bb")


async def test_client_gets_a_status_when_the_first_write_was_given_up() -> None:
    """The library forgets then that the headers are sent, and a second time they cannot be."""
    async with Server([DECODE_SERVICE]) as server:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(HastyDecode(), server.grpc)
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel, asyncio.timeout(30):
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(pb.GenerateRequest())
            with pytest.raises(grpc.RpcError) as caught:
                _ = [response async for response in call]

    error = from_rpc_error(caught.value)
    assert isinstance(error, RemoteFailure)
    assert error.reason == "KV_CHECKSUM"
