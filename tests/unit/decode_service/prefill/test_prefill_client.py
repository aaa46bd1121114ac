"""How the decode service connects to a prefill service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from common.errors import (
    ConfigError,
    Difference,
    InvariantViolation,
    KVSpanError,
    PeerLost,
    SlabNotShared,
)
from common.kv.digest import DigestKind
from common.kv.plan import SpanGranularity
from common.session.messages import Hello, SlabHandle, VersionRange
from common.session.negotiation import PrefillOffer
from common.slab.segment import SlabSegment
from common.wire.convert import capabilities_to_proto
from common.wire.server import Server
from decode_service.prefill import prefill_client
from decode_service.prefill.importer import Importer
from decode_service.prefill.peer_connection import PeerConfig, PeerConnection, make_slab
from decode_service.prefill.peer_problem import FINISHING
from decode_service.prefill.peer_session import SessionContext
from decode_service.prefill.prefill_client import PeerState, PrefillPeer
from decode_service.prefill.slab_refusals import SlabRefusals
from kvspan.v1 import transfer_pb2_grpc
from tests.support.clock import ManualClock
from tests.support.factories import make_geometry
from tests.support.pair import wait_until
from tests.support.prefill_peers import turns
from tests.support.sessions import make_hello, make_identity, make_offer

pytestmark = pytest.mark.usefixtures("leak_check")


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


class RefusingPrefill(transfer_pb2_grpc.PrefillServiceServicer):
    """Offers what a test says and refuses every session, each time with another text."""

    def __init__(self, offer: PrefillOffer, refusal: KVSpanError | None = None) -> None:
        self._offer = offer
        self._refusal = refusal
        self.num_refused = 0

    async def GetCapabilities(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the offer."""
        return capabilities_to_proto(self._offer, linears="", num_threads=1)

    async def Transfer(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Refuse a session."""
        self.num_refused += 1
        if self._refusal:
            raise self._refusal
        raise ConfigError("slab_bytes", self.num_refused, f"{self.num_refused} bytes free")


@asynccontextmanager
async def connecting(
    prefill: RefusingPrefill, tmp_path: Path, slab_dir: Path
) -> AsyncIterator[tuple[PrefillPeer, asyncio.Task[None]]]:
    """Run a prefill service and a peer that tries to have a session with it."""
    context = SessionContext(cast("Importer", None), lambda: None, ManualClock(30))
    server = Server([])
    transfer_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server.grpc)
    address = server.listen(f"unix:{tmp_path}/prefill.sock")
    async with server:
        await server.start()
        peer = PrefillPeer(address, make_config(slab_dir), context)
        running = asyncio.create_task(peer.run())
        yield peer, running
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (replace(make_offer(), versions=VersionRange(8, 9)), "PROTOCOL_VERSION_MISMATCH"),
        (replace(make_offer(), digests=(DigestKind.XXH3_128,)), "SPAN_LAYOUT_MISMATCH"),
        (replace(make_offer(), modes=()), "SPAN_LAYOUT_MISMATCH"),
        (replace(make_offer(), granularity=SpanGranularity(7, 0, 4096)), "MODEL_MISMATCH"),
        (make_offer(make_identity(make_geometry(vocab_size=12))), "KV_GEOMETRY_MISMATCH"),
    ],
)
async def test_a_peer_whose_capabilities_do_not_fit_costs_no_slab(
    tmp_path: Path, slab_dir: Path, offer: PrefillOffer, reason: str
) -> None:
    """Version, digest, modes, grid and shape are compared before a session is tried, by the same rule."""
    prefill = RefusingPrefill(offer)
    async with connecting(prefill, tmp_path, slab_dir) as (peer, _):
        await wait_until(lambda: peer.statistics().state is PeerState.REFUSED)
        counts = peer.statistics()

    assert counts.problem is not None
    assert (counts.problem.reason, counts.boot_id) == (reason, "prefill-boot")
    assert counts.problem.differences
    assert prefill.num_refused == 0


async def test_another_service_at_the_address_is_told_apart(tmp_path: Path, slab_dir: Path) -> None:
    """Whoever gave the address of a decode service sees it in the status."""
    server = Server([])
    address = server.listen(f"unix:{tmp_path}/other.sock")
    async with server:
        await server.start()
        peer = PrefillPeer(address, make_config(slab_dir), cast("SessionContext", None))
        running = asyncio.create_task(peer.run())
        await wait_until(lambda: "no prefill service" in str(peer.problem) or running.done())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert peer.problem is not None
    assert peer.problem.text == "what answers there is no prefill service"


async def test_the_same_problem_is_logged_once(
    tmp_path: Path, slab_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer is tried again and again; its reason and the differences tell a new problem, not its text."""
    monkeypatch.setattr(prefill_client, "LONGEST_PAUSE_S", 0.01)
    prefill = RefusingPrefill(make_offer())
    async with connecting(prefill, tmp_path, slab_dir) as (peer, _):
        await wait_until(lambda: prefill.num_refused >= 3)
        await wait_until(lambda: "3 bytes free" in str(peer.problem))

    logged = [record for record in caplog.records if record.getMessage() == "session.failed"]
    assert [record.__dict__["fields"]["reason"] for record in logged] == ["CONFIG_INVALID"]


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0a\x02\x08"])
async def test_a_peer_that_talks_nonsense_is_a_peer_that_breaks_the_protocol(
    tmp_path: Path, slab_dir: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The library hands None in place of what it cannot parse; the service must not end of that."""
    caplog.set_level(logging.CRITICAL, "grpc._common")  # a kept record would keep the call alive

    async def nonsense(request: bytes, context: Any) -> bytes:
        return data

    answering: Any = grpc.unary_unary_rpc_method_handler(nonsense)
    server = Server([])
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

    assert "cannot be read" in str(peer.problem)


async def test_a_bug_that_one_peer_finds_does_not_end_the_service(
    tmp_path: Path, slab_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer is tried again like any that was lost; a broken invariant ends the service, though."""
    caplog.set_level(
        logging.CRITICAL, "decode_service.prefill.peer_connection"
    )  # a kept record keeps the channel
    faults: list[Exception] = [ZeroDivisionError("by a peer"), InvariantViolation("two owners")]

    async def check_peer(self: PeerConnection, stub: object) -> None:
        raise faults.pop(0)

    monkeypatch.setattr(PeerConnection, "_check_peer", check_peer)
    peer = PrefillPeer(f"unix:{tmp_path}/none.sock", make_config(slab_dir), cast("SessionContext", None))

    with pytest.raises(InvariantViolation):
        await peer.run()

    assert "ZeroDivisionError: by a peer" in str(peer.problem)


class ScriptedConnection(PeerConnection):
    """A connection that is passed and ends when a test says so."""

    def __init__(self, made: list[ScriptedConnection]) -> None:
        refusals = SlabRefusals(ManualClock(30))
        super().__init__(
            "none", cast("PeerConfig", None), cast("SessionContext", None), refusals, lambda _: None
        )
        self._is_over = asyncio.Event()
        made.append(self)

    def pass_by(self) -> None:
        """Take no more transfers."""
        self._has_passed.set()

    def end(self) -> None:
        """Finish."""
        self._is_over.set()

    async def run(self) -> PeerLost:
        """See `PeerConnection`."""
        await self._is_over.wait()
        self._has_ended = True
        self._has_passed.set()
        return PeerLost("it is over")


async def test_one_connection_finishes_beside_one_that_is_open_and_no_third(
    tmp_path: Path, slab_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a slab: a peer that never drains costs two of them at most."""
    made: list[ScriptedConnection] = []
    monkeypatch.setattr(prefill_client, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(prefill_client, "PeerConnection", lambda *_: ScriptedConnection(made))
    peer = PrefillPeer(f"unix:{tmp_path}/none.sock", make_config(slab_dir), cast("SessionContext", None))
    running = asyncio.create_task(peer.run())
    await turns(20)
    assert len(made) == 1

    made[0].pass_by()
    await turns(20)
    made[1].pass_by()
    await turns(20)

    assert len(made) == 2
    assert peer.problem == FINISHING
    made[0].end()
    await turns(20)
    assert len(made) == 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_slab_that_was_refused_is_not_made_again_at_once(
    tmp_path: Path, slab_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is asked again who it is, which is cheap, and its refusal stands meanwhile."""
    asked: list[str] = []
    check = SlabRefusals.check

    def noted(self: SlabRefusals, boot_id: str) -> None:
        asked.append(boot_id)
        check(self, boot_id)

    monkeypatch.setattr(prefill_client, "REFUSED_PAUSE_S", 0.0)
    monkeypatch.setattr(SlabRefusals, "check", noted)
    refusal = SlabNotShared([Difference("slab.socket", "made one", "finds none")])
    prefill = RefusingPrefill(make_offer(), refusal)
    async with connecting(prefill, tmp_path, slab_dir) as (peer, _):
        await wait_until(lambda: len(asked) > 4)
        problem = peer.problem

    assert problem is not None
    assert (prefill.num_refused, problem.reason) == (1, "SLAB_NOT_SHARED")


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
