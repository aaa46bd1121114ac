"""A prefill service played by the driver: honest but for one thing, which a script says.

Theory of operation: it greets with the identity that decode told it, maps the slab and answers each prompt
with spans of zeros whose digests are right. A script changes the messages on their way out; without one it
does not take calls. A cancel is answered by nothing but what the script sends.

Ownership: `HostilePrefill` owns its server and one mapping per session; it serves one decode service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from common.kv.digest import DigestKind, digest
from common.kv.geometry import KVGeometry
from common.kv.plan import SpanGranularity, plan_spans
from common.kv.spans import SPAN_LAYOUT, Span
from common.session.identity import EngineFacts
from common.session.messages import (
    GroupTotals,
    Hello,
    Ping,
    Pong,
    PrefillAccepted,
    PrefillDone,
    SourceTimings,
    SpanSealed,
    StartPrefill,
    TransferMode,
    Welcome,
)
from common.session.negotiation import PROTOCOL_VERSIONS, PrefillOffer
from common.slab.segment import SlabSegment
from common.wire.convert import (
    capabilities_to_proto,
    decode_message_from_proto,
    to_proto,
)
from common.wire.convert_identity import IDENTITY
from kvspan.v1 import geometry_pb2
from kvspan.v1 import transfer_pb2 as pb
from tests.support.slabs import make_slabs

GRANULARITY = SpanGranularity(chunk_tokens=64, min_span_bytes=24 << 10, max_span_bytes=48 << 10)
BOOT_ID = "hostile"

Messages = list[pb.TransferResponse]
Change = Callable[[Messages], Messages]


def unchanged(messages: Messages) -> Messages:
    """Send what an honest peer sends."""
    return messages


def nothing(_: object) -> Messages:
    """Send, or do, nothing."""
    return []


@dataclass(frozen=True, slots=True)
class Script:
    """What the peer does wrong, and what the victim must see."""

    name: str
    expected: str
    answer: Change = unchanged
    """Changes PrefillAccepted, the spans and PrefillDone of each prompt."""

    also: str = ""
    """Another end that is as right: who sees a deadline pass first is chance."""

    fill: int = 0
    """Every byte of the KV."""

    harm: Callable[[SlabSegment], object] = nothing
    """Done to the slab once all of a prompt is written, before a word of it is said."""

    greet: Change = unchanged
    """Changes Welcome, which is all that is sent before the first prompt."""

    problem: str = ""
    """What decode must say of a peer that it does not open a session with."""

    time_limit_s: float = 30.0
    """Deadline of the victim."""

    is_held: bool = False
    """Whether copies of the victim are held until decode has heard all that the peer says of it."""

    late: Change = nothing
    """Chooses what of honest messages is said at a ping, once `HostilePrefill.is_late`."""

    lies_about_time: bool = False
    """Whether decode must mark the times of the victim as a clock error."""

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


class HostilePrefill:
    """The server; `script` says how it behaves from the next session on."""

    def __init__(self, address: str, identity: geometry_pb2.PeerIdentity, slab_dir: Path) -> None:
        self.script: Script | None = None
        self.is_late = False
        """Whether the time has come for what scripts say late."""

        self._address = address
        self._identity = IDENTITY.read("identity", identity)
        self._slab_dir = slab_dir
        self._slabs = make_slabs()
        self._server = grpc.aio.server()
        self._streams: set[asyncio.Future[None]] = set()
        # Invariant: one for each open stream, which ends when it is done.

    async def start(self) -> None:
        """Listen."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetCapabilities": grpc.unary_unary_rpc_method_handler(
                self.GetCapabilities,
                pb.PrefillServiceGetCapabilitiesRequest.FromString,
                pb.PrefillServiceGetCapabilitiesResponse.SerializeToString,
            ),
            "Transfer": grpc.stream_stream_rpc_method_handler(
                self.Transfer, pb.TransferRequest.FromString, _serialized
            ),
        }
        generic = grpc.method_handlers_generic_handler("kvspan.v1.PrefillService", handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_insecure_port(self._address)
        await self._server.start()

    async def stop(self) -> None:
        """End all streams and listen no more."""
        await self._server.stop(0)

    def end_sessions(self) -> None:
        """End every stream."""
        for ended in self._streams:
            ended.set_result(None)

    async def GetCapabilities(  # noqa: N802 - name given by the contract
        self, request: pb.PrefillServiceGetCapabilitiesRequest, context: Any
    ) -> pb.PrefillServiceGetCapabilitiesResponse:
        """Tell what decode wants to hear."""
        if self.script is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no script is played")
        return capabilities_to_proto(self.offer(), linears="hostile", num_threads=1)

    async def Transfer(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Serve one session by the script, until either side ends it."""
        assert self.script is not None
        session = _Session(self, self.script, context)
        ended = asyncio.get_running_loop().create_future()
        self._streams.add(ended)
        work = asyncio.create_task(session.serve())
        try:
            await asyncio.wait([work, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(ended)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def attach(self, hello: Hello) -> SlabSegment:
        """Map the slab of a session; the caller closes it."""
        return SlabSegment.attach(self._slab_dir, hello.slab.name, hello.slab.size_bytes, self._slabs)

    def offer(self) -> PrefillOffer:
        """Return what a session is told."""
        return PrefillOffer(
            versions=PROTOCOL_VERSIONS,
            boot_id=BOOT_ID,
            identity=self._identity,
            modes=tuple(TransferMode),
            digests=(DigestKind.XXH3_64,),
            layouts=(SPAN_LAYOUT,),
            granularity=GRANULARITY,
            max_prompt_tokens=1024,
            max_concurrency=8,
            engine=EngineFacts("hostile"),
        )

    def welcome(self, slab: SlabSegment) -> pb.TransferResponse:
        """Return an honest Welcome."""
        offer = self.offer()
        return to_proto(
            Welcome(
                version=offer.versions.maximum,
                boot_id=BOOT_ID,
                identity=offer.identity,
                modes=offer.modes,
                digest=offer.digests[0],
                granularity=offer.granularity,
                max_prompt_tokens=offer.max_prompt_tokens,
                max_concurrency=offer.max_concurrency,
                engine=offer.engine,
                nonce=slab.nonce,
            )
        )


class _Session:
    """One stream; owns the mapping of its slab."""

    def __init__(self, owner: HostilePrefill, script: Script, context: Any) -> None:
        self._owner = owner
        self._script = script
        self._context = context
        self._slab: SlabSegment | None = None
        self._late: Messages = []
        # Invariant: what was not said yet and will be.

    async def serve(self) -> None:
        """Answer what comes until the stream ends."""
        try:
            while (request := await self._context.read()) is not grpc.aio.EOF:
                for response in self._responses(request):
                    await self._context.write(response)
        finally:
            if self._slab is not None:
                self._slab.close()

    def _responses(self, request: pb.TransferRequest) -> Messages:
        message = decode_message_from_proto(request)
        match message:
            case Hello():
                self._slab = self._owner.attach(message)
                return self._script.greet([self._owner.welcome(self._slab)])
            case StartPrefill() if self._slab is not None:
                geometry = self._owner.offer().identity.geometry
                honest = answer(message, self._slab, geometry, self._script.fill)
                self._script.harm(self._slab)
                self._late += self._script.late(honest)
                return self._script.answer(honest)
            case Ping(number):
                late, self._late = (self._late, []) if self._owner.is_late else ([], self._late)
                return [to_proto(Pong(number)), *late]
        return []


NO_MESSAGE, NO_TEXT = (pb.TransferResponse(pong=pb.Pong(number=number)) for number in (901, 902))
"""Stand for bytes that are no message, and for a message whose text is no UTF-8."""

_RAW = {901: b"\xff" * 64, 902: b"\x2a\x04\x1a\x02\xff\xfe"}


def _serialized(message: pb.TransferResponse) -> bytes:
    return _RAW.get(message.pong.number) or message.SerializeToString()


def answer(start: StartPrefill, slab: SlabSegment, geometry: KVGeometry, fill: int) -> Messages:
    """Return what an honest peer says to a prompt, over one byte again and again."""
    plan = plan_spans(geometry, start.required, GRANULARITY)
    totals = [[0, 0, 0] for _ in geometry.groups]
    now_ns = time.monotonic_ns()
    messages = [to_proto(PrefillAccepted(start.transfer_id, start.attempt, 0))]
    for sequence, planned in enumerate(plan):
        offset = start.slot_offset + planned.offset
        memory = slab.view(offset, planned.length)
        memory[:] = bytes([fill]) * planned.length
        span = Span(
            transfer_id=start.transfer_id,
            attempt=start.attempt,
            slot_id=start.slot_id,
            generation=start.generation,
            sequence=sequence,
            group_index=planned.group_index,
            layers=planned.layers,
            tokens=planned.tokens,
            offset=offset,
            length=planned.length,
            digest=digest(DigestKind.XXH3_64, memory),
            written_ns=now_ns,
            sealed_ns=now_ns,
        )
        memory.release()
        messages.append(to_proto(SpanSealed(span)))
        counts = (1, planned.length, len(planned.layers) * len(planned.tokens))
        for index, count in enumerate(counts):
            totals[planned.group_index][index] += count
    done = PrefillDone(
        transfer_id=start.transfer_id,
        attempt=start.attempt,
        generation=start.generation,
        totals=tuple(GroupTotals(index, *counts) for index, counts in enumerate(totals)),
        logits=bytes(4 * geometry.vocab_size),
        timings=SourceTimings(now_ns, now_ns, now_ns),
    )
    return [*messages, to_proto(done)]
