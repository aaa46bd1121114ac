"""How the decode service connects to a prefill service."""

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from common.errors import InvariantViolation
from common.runtime.clock import ManualClock
from common.session.messages import Hello, SlabHandle
from common.slab.segment import SlabSegment
from common.wire.channel import make_channel
from common.wire.server import make_server
from decode_service.prefill.peer_session import SessionContext
from decode_service.prefill.prefill_client import PeerConfig, PeerState, PrefillPeer, make_slab, received
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1 import transfer_pb2_grpc
from tests.support.pair import wait_until
from tests.support.sessions import make_hello

pytestmark = pytest.mark.usefixtures("leak_check")

NUM_SAID = 50


def make_config(slab_dir: Path) -> PeerConfig:
    """Return a configuration with a slab of 16 MiB."""

    def hello(slab: SlabHandle) -> Hello:
        return make_hello()

    return PeerConfig(hello, slab_dir, 16 << 20, "decode-boot", 7.0, ManualClock(30))


def names_in(slab_dir: Path) -> list[str]:
    """Return the names of the slabs that are there."""
    return [path.name for path in slab_dir.iterdir()]


async def test_a_slab_is_that_of_the_configuration(slab_dir: Path) -> None:
    """Size, owner and place."""
    with await make_slab(make_config(slab_dir)) as slab:
        assert (slab.size_bytes, slab.boot_id) == (16 << 20, "decode-boot")
        assert names_in(slab_dir) == [slab.name]


class TalkativePrefill(transfer_pb2_grpc.PrefillServiceServicer):
    """Says all at once and ends the stream."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    async def Transfer(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Serve a session."""
        for number in range(NUM_SAID):
            await context.write(pb.TransferResponse(pong=pb.Pong(number=number)))
        self.has_ended.set()


async def test_what_a_peer_said_before_it_ended_the_stream_is_heard(tmp_path: Path) -> None:
    """A word of ours that meets the closed stream does not lose what has arrived and was not read."""
    server, peer = make_server([]), TalkativePrefill()
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

        said = [response.pong.number async for response in received(call)]

    assert said == list(range(NUM_SAID))


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0a\x02\x08"])
async def test_a_peer_that_talks_nonsense_is_a_peer_that_breaks_the_protocol(
    tmp_path: Path, slab_dir: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The library hands None in place of what it cannot parse; the service must not end of that."""
    caplog.set_level(logging.CRITICAL, "grpc._common")  # a kept record would keep the call alive

    async def nonsense(request: bytes, context: Any) -> bytes:
        return data

    answering: Any = grpc.unary_unary_rpc_method_handler(nonsense)
    server = make_server([])
    server.grpc.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kvspan.v1.PrefillService", {"GetCapabilities": answering}),)
    )
    address = server.listen(f"unix:{tmp_path}/prefill.sock")
    peer = PrefillPeer(address, make_config(slab_dir), cast("SessionContext", None))
    async with server:
        await server.start()
        running = asyncio.create_task(peer.run())
        await wait_until(lambda: peer.statistics().state is PeerState.REFUSED or running.done())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert "cannot be read" in peer.problem


async def test_a_bug_that_one_peer_finds_does_not_end_the_service(
    tmp_path: Path, slab_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer is tried again like any that was lost; a broken invariant ends the service, though."""
    caplog.set_level(
        logging.CRITICAL, "decode_service.prefill.prefill_client"
    )  # a kept record keeps the channel
    faults: list[Exception] = [ZeroDivisionError("by a peer"), InvariantViolation("two owners")]

    async def check_peer(self: PrefillPeer, stub: object) -> None:
        raise faults.pop(0)

    monkeypatch.setattr(PrefillPeer, "_check_peer", check_peer)
    peer = PrefillPeer(f"unix:{tmp_path}/none.sock", make_config(slab_dir), cast("SessionContext", None))

    with pytest.raises(InvariantViolation):
        await peer.run()

    assert "ZeroDivisionError: by a peer" in peer.problem


async def test_a_service_that_stops_while_a_slab_is_made_leaves_none(
    slab_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that makes it cannot be stopped, so its slab is closed when it is there (rule 9)."""
    made: list[SlabSegment] = []
    create = SlabSegment.create

    def note(directory: Path, size_bytes: int, boot_id: str) -> SlabSegment:
        made.append(create(directory, size_bytes, boot_id))
        return made[0]

    monkeypatch.setattr(SlabSegment, "create", note)
    making = asyncio.create_task(make_slab(make_config(slab_dir)))
    await asyncio.sleep(0)

    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making

    assert [slab.is_closed for slab in made] == [True]
    assert not names_in(slab_dir)
