"""Messages of a session for tests, and a scripted decode service behind a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from common.kv.digest import DigestKind
from common.kv.plan import SpanGranularity
from common.kv.spans import SPAN_LAYOUT
from common.session.identity import EngineFacts, ModelFingerprint, Numerics, Origin, PeerIdentity
from common.session.messages import (
    GroupTotals,
    Hello,
    PrefillDone,
    SlabHandle,
    SourceTimings,
    StartPrefill,
    TransferMode,
    VersionRange,
    Welcome,
)
from common.wire.failure import remote_failure
from common.wire.server import Server
from kvspan.v1 import decode_pb2, decode_pb2_grpc
from tests.support.factories import make_hybrid_geometry

DECODE_SERVICE = "kvspan.v1.DecodeService"

Context = grpc.aio.ServicerContext[Any, Any]
Generate = Callable[[decode_pb2.GenerateRequest, Context], AsyncIterator[decode_pb2.GenerateResponse]]


def make_peer_identity() -> PeerIdentity:
    """Return an identity whose fields all differ."""
    return PeerIdentity(
        model_name="tiny",
        fingerprint=ModelFingerprint(config="c0", weights="e1", tokenizer="70", rounded_weights="5a"),
        config_fields=(("hidden_size", "24"), ("model_type", '"tiny"')),
        geometry=make_hybrid_geometry(),
        numerics=Numerics(engine="torch-cpu", chunk_tokens=8),
        tokenizer_fields=(("chat_template", '"one"'), ("special_ids", '{"eos":2}')),
    )


def make_hello_message() -> Hello:
    """Return the first message of decode."""
    return Hello(
        versions=VersionRange(1, 2),
        boot_id="boot-d",
        identity=make_peer_identity(),
        modes=(TransferMode.STREAM, TransferMode.WHOLE),
        digests=(DigestKind.XXH3_64, DigestKind.OFF),
        slab=SlabHandle(name="kvspan-1", size_bytes=8192, layout=SPAN_LAYOUT),
    )


def make_start_message() -> StartPrefill:
    """Return a request for the KV of five tokens."""
    return StartPrefill(
        transfer_id=21,
        attempt=1,
        slot_id=7,
        generation=3,
        slot_offset=4096,
        slot_size=2048,
        token_ids=(5, 9, 2, 8, 4),
        first_tokens=(4, 5),
        mode=TransferMode.DEFERRED,
        time_limit_s=2.5,
        request_id="r-6",
    )


def make_welcome_message() -> Welcome:
    """Return the answer of prefill to a hello."""
    return Welcome(
        version=1,
        boot_id="boot-p",
        identity=make_peer_identity(),
        modes=(TransferMode.STREAM,),
        digest=DigestKind.XXH3_64,
        granularity=SpanGranularity(
            chunk_tokens=8, min_span_bytes=128, max_span_bytes=512, layer_stops=(1, 3)
        ),
        max_prompt_tokens=40,
        max_concurrency=3,
        engine=EngineFacts("npu", Origin.DECLARED, (8, 40), can_resume=True),
        nonce=b"nonce",
        longest_step_ms=1700,
    )


def make_done_message() -> PrefillDone:
    """Return the end of a transfer of two groups."""
    return PrefillDone(
        transfer_id=21,
        attempt=1,
        generation=3,
        totals=(GroupTotals(0, 2, 640, 25), GroupTotals(1, 1, 320, 10)),
        logits=b"\x00\x00\x80\x3f",
        timings=SourceTimings(accepted_ns=100, started_ns=200, ended_ns=500),
    )


class ScriptedDecode(decode_pb2_grpc.DecodeServiceServicer):
    """A decode service whose answers a test gives; keeps the requests it saw."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self.requests: list[decode_pb2.GenerateRequest] = []

    async def Generate(  # noqa: N802 - name given by the contract
        self, request: decode_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        """Yield what the test's function yields."""
        self.requests.append(request)
        async for response in self._generate(request, context):
            yield response

    async def GetCapabilities(  # noqa: N802 - name given by the contract
        self, request: decode_pb2.DecodeServiceGetCapabilitiesRequest, context: Context
    ) -> decode_pb2.DecodeServiceGetCapabilitiesResponse:
        """Return a boot id."""
        return decode_pb2.DecodeServiceGetCapabilitiesResponse(boot_id="boot-d", num_lanes=5)

    async def GetStatus(  # noqa: N802 - name given by the contract
        self, request: decode_pb2.GetStatusRequest, context: Context
    ) -> decode_pb2.GetStatusResponse:
        """Return a number of steps."""
        return decode_pb2.GetStatusResponse(num_steps=13)


async def answer_hello(
    request: decode_pb2.GenerateRequest, context: Context
) -> AsyncIterator[decode_pb2.GenerateResponse]:
    """Answer every request with "Hello" in two pieces."""
    yield decode_pb2.GenerateResponse(token_ids=[4], text="Hel", request_id="r-1")
    yield decode_pb2.GenerateResponse(
        token_ids=[6, 7], text="lo", finish_reason=decode_pb2.FINISH_REASON_STOP, usage={"prompt_tokens": 3}
    )


class SlowDoor:
    """A listener before a real server that lets connections wait until it is opened."""

    def __init__(self, behind: str) -> None:
        self._host, self._port = behind.rsplit(":", 1)
        self._is_open = asyncio.Event()
        self._held: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Let everybody through who has come or comes."""
        self._is_open.set()

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold one connection, then carry its bytes both ways."""
        self._held.add(asyncio.ensure_future(self._carry_both(reader, writer)))

    async def close(self) -> None:
        """End what is carried, with its sockets."""
        for task in self._held:
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)

    async def _carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _closing(writer):
            await self._is_open.wait()
            inner_reader, inner_writer = await asyncio.open_connection(self._host, int(self._port))
            async with _closing(inner_writer):
                await asyncio.gather(_carry(reader, inner_writer), _carry(inner_reader, writer))


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


@asynccontextmanager
async def slow_door(behind: str) -> AsyncIterator[tuple[SlowDoor, str]]:
    """Yield a door that is shut, and the address before it."""
    door = SlowDoor(behind)
    listener = await asyncio.start_server(door.admit, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    try:
        yield door, f"{host}:{port}"
    finally:
        listener.close()
        await door.close()


@asynccontextmanager
async def serving(
    servicer: ScriptedDecode, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[Server, str]]:
    """Run a scripted decode service; yields the server and its address."""
    async with Server([DECODE_SERVICE]) as server:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server.grpc)
        bound = server.listen(address)
        await server.start()
        await server.mark_serving()
        yield server, bound


async def is_serving(channel: grpc.aio.Channel, service: str = "", *, time_limit_s: float = 5.0) -> bool:
    """Ask once for the health of a service by its full name, or of the process.

    Raises: `RemoteFailure` when nobody answers or the service is not known there.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=time_limit_s)
    except grpc.RpcError as error:
        raise remote_failure(error) from error
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
