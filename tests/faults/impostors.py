"""Everything that something else than a decode service can say to a prefill service.

Each opens a session of its own, with a slab of its own; a prompt that cannot be served is refused alone, what
the session does not allow ends it with a status. Sessions of others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from common.session.negotiation import PROTOCOL_VERSIONS
from common.slab.segment import SlabSegment
from common.wire.channel import make_channel
from common.wire.convert_identity import VERSIONS
from kvspan.v1 import geometry_pb2, transfer_pb2_grpc
from kvspan.v1 import transfer_pb2 as pb
from tests.support.memories import BAD, SIZE, can_truncate, descriptor_of, punch
from tests.support.slabs import FalseSlab, false_slab, served_slab

ANSWER_LIMIT_S = 30.0
NOT_ENDS = frozenset({"prefill_accepted", "kv_span", "welcome"})
"""Messages after which an impostor reads on."""


@dataclass(frozen=True, slots=True)
class Impostor:
    """Who says it: a slab, and the identity that the prefill service has."""

    slab: SlabSegment | FalseSlab
    identity: geometry_pb2.PeerIdentity

    def hello(self, name: str = "", size_bytes: int = 0, **changes: Any) -> pb.TransferRequest:
        """Return an honest Hello, or one that names another slab."""
        layout = geometry_pb2.SPAN_LAYOUT_LAYER_KV_TOKEN_HEAD_DIM
        fields: dict[str, Any] = {
            "versions": VERSIONS.write(PROTOCOL_VERSIONS),
            "boot_id": "impostor",
            "identity": self.identity,
            "modes": [geometry_pb2.TRANSFER_MODE_STREAM],
            "digests": [geometry_pb2.DIGEST_KIND_XXH3_64],
            "slab": pb.SlabHandle(
                socket=name or self.slab.name, size_bytes=size_bytes or self.slab.size_bytes, layout=layout
            ),
        }
        return pb.TransferRequest(hello=pb.Hello(**{**fields, **changes}))

    def start(self, **changes: Any) -> pb.TransferRequest:
        """Return an honest StartPrefill with some fields changed."""
        fields: dict[str, Any] = {
            "transfer_id": 1,
            "attempt": 1,
            "slot_id": 0,
            "generation": 1,
            "slot_offset": self.slab.data.start,
            "slot_size": len(self.slab.data),
            "token_ids": [65] * 40,
            "first_tokens": [0],
            "mode": geometry_pb2.TRANSFER_MODE_STREAM,
            "time_limit": {"seconds": 5},
        }
        return pb.TransferRequest(start_prefill=pb.StartPrefill(**{**fields, **changes}))


Said = Callable[[Impostor], list[pb.TransferRequest]]


@dataclass(frozen=True, slots=True)
class Lie:
    """What is said, and what must come back: the name of a message, or of a status."""

    expected: str
    said: Said
    greets: bool = True
    """Whether an honest Hello and its Welcome come before."""

    memory: Callable[[], int] | None = None
    """What is handed over in the place of a slab."""

    harm: Callable[[SlabSegment], object] | None = None
    """Done to the slab between Welcome and what is said."""

    is_twice: bool = False
    """Whether another session has the slab, and goes on meanwhile."""


def starts(**changes: Any) -> Said:
    """Say one StartPrefill with some fields changed."""
    return lambda me: [me.start(**changes)]


def greets(name: str = "", **changes: Any) -> Said:
    """Say one Hello with some fields changed."""
    return lambda me: [me.hello(name, **changes)]


def of_nothing(me: Impostor) -> list[pb.TransferRequest]:
    """Release and cancel what never was, and ask for a sign of life."""
    return [
        pb.TransferRequest(release_span=pb.ReleaseSpan(transfer_id=9, attempt=1, sequence=3)),
        pb.TransferRequest(cancel_prefill=pb.CancelPrefill(transfer_id=9, attempt=1)),
        pb.TransferRequest(ping=pb.Ping(number=4)),
    ]


def _truncate(slab: SlabSegment) -> None:
    """Try to end prefill by SIGBUS."""
    assert not can_truncate(descriptor_of(slab))


def _punch(slab: SlabSegment) -> None:
    """Take all of the memory away, the header too."""
    punch(descriptor_of(slab), 0, slab.size_bytes)


REFUSED, FORBIDDEN = "prefill_failed", "FAILED_PRECONDITION"
LIES = {
    "an honest start": Lie("prefill_done", starts()),
    "start without a prompt": Lie(REFUSED, starts(token_ids=[])),
    "start of foreign tokens": Lie(REFUSED, starts(token_ids=[1 << 30])),
    "start of a long prompt": Lie(REFUSED, starts(token_ids=[65] * 5000)),
    "start beyond the slab": Lie(REFUSED, starts(slot_offset=1 << 50)),
    "start in the header": Lie(REFUSED, starts(slot_offset=0)),
    "start in a tiny slot": Lie(REFUSED, starts(slot_size=64)),
    "start behind the prompt": Lie(REFUSED, starts(first_tokens=(4000,))),
    "start of id 0": Lie(REFUSED, starts(transfer_id=0)),
    "two starts in one slot": Lie(REFUSED, lambda me: [me.start(), me.start(transfer_id=2)]),
    "start in no mode": Lie(FORBIDDEN, starts(mode=0)),
    "start in an unknown mode": Lie(FORBIDDEN, starts(mode=44)),
    "start without time": Lie(FORBIDDEN, starts(time_limit={"seconds": -5})),
    "start before hello": Lie(FORBIDDEN, starts(), greets=False),
    "message of nothing": Lie(FORBIDDEN, lambda me: [pb.TransferRequest()]),
    "second hello": Lie(FORBIDDEN, greets()),
    "release and cancel of nothing": Lie("pong", of_nothing),
    "nothing but nonsense": Lie(FORBIDDEN, lambda me: of_nothing(me)[:2] * 501),
    "slab of another folder": Lie(FORBIDDEN, greets("../../etc/passwd"), greets=False),
    "slab that is not there": Lie(FORBIDDEN, greets(f"kvspan-{'0' * 24}.sock"), greets=False),
    "slab beyond all limits": Lie(FORBIDDEN, lambda me: [me.hello(size_bytes=1 << 40)], greets=False),
    "slab of another session": Lie(FORBIDDEN, greets(), greets=False, is_twice=True),
    "slab cut and stretched": Lie("prefill_done", starts(), harm=_truncate),
    "slab full of holes": Lie("prefill_done", starts(), harm=_punch),
    **{
        f"slab: {name}": Lie(FORBIDDEN, greets(), greets=False, memory=make)
        for name, (make, _) in BAD.items()
    },
    "hello without an identity": Lie(FORBIDDEN, greets(identity=None), greets=False),
    "hello without a boot id": Lie(FORBIDDEN, greets(boot_id=""), greets=False),
    "hello of unknown digests": Lie(FORBIDDEN, greets(digests=[99]), greets=False),
}


async def tell(target: str, slab_dir: Path, lie: Lie) -> str:
    """Say it in a session of its own; return the message or the status that ends it."""
    with _slab(slab_dir, lie) as slab:
        async with make_channel(target) as channel, asyncio.timeout(ANSWER_LIMIT_S):
            stub = transfer_pb2_grpc.PrefillServiceStub(channel)
            offer = await stub.GetCapabilities(pb.PrefillServiceGetCapabilitiesRequest())
            me = Impostor(slab, offer.identity)
            first: Any = stub.Transfer()
            if lie.is_twice:
                await _open(first, me)
            call: Any = stub.Transfer()
            if lie.harm is not None and isinstance(slab, SlabSegment):
                await _open(call, me)
                lie.harm(slab)
            elif lie.greets:
                await call.write(me.hello())
            for message in lie.said(me):
                await call.write(message)
            return await _first_end(call)


def _slab(slab_dir: Path, lie: Lie) -> AbstractContextManager[SlabSegment | FalseSlab]:
    if lie.memory is not None:
        return false_slab(slab_dir, lie.memory(), SIZE)
    return served_slab(slab_dir, SIZE, "impostor")


async def _open(call: Any, me: Impostor) -> None:
    """Open a session and see it welcomed."""
    await call.write(me.hello())
    assert (await call.read()).WhichOneof("message") == "welcome"


async def _first_end(call: Any) -> str:
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            kind = str(response.WhichOneof("message"))
            if kind not in NOT_ENDS:
                return kind
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return str((await call.code()).name)
