"""The gRPC face of the prefill service: one `DecodePeer` per stream, its capabilities and its status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc

from common.errors import InvariantViolation, PeerLost, ShuttingDown
from common.runtime.silence import SilenceWatch
from common.runtime.tasks import first_end, listed
from common.telemetry.logging import log_fields
from common.wire.convert import capabilities_to_proto, decode_message_from_proto, to_proto
from common.wire.interceptor import CallStatistics, read_first
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1 import transfer_pb2_grpc
from prefill_service.decode_peer import DecodePeer, PeerContext
from prefill_service.engine_loop import EngineLoop
from prefill_service.status import status_to_proto
from prefill_service.totals import Totals

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

CountCalls = Callable[[], CallStatistics]


class PrefillServicer(transfer_pb2_grpc.PrefillServiceServicer):
    """Serves sessions; the peers of ended streams stay listed until their slab is idle."""

    def __init__(
        self, context: PeerContext, engine_loop: EngineLoop, calls: CountCalls, linears: str, threads: int
    ) -> None:
        self._context = context
        self._engine_loop = engine_loop
        self._calls = calls
        self._linears = linears
        self._threads = threads
        self._peers: dict[int, DecodePeer] = {}
        self._next_number = 1
        self._streams: set[asyncio.Task[Any]] = set()
        # Invariant: the tasks of running Transfer calls.
        self._is_shutting_down = False

    async def GetCapabilities(  # noqa: N802 - name given by the contract
        self, request: pb.PrefillServiceGetCapabilitiesRequest, context: Context
    ) -> pb.PrefillServiceGetCapabilitiesResponse:
        """Tell what this service is and can; decode asks before it makes a slab, so not when it ends."""
        self._refuse_when_shutting_down()
        return capabilities_to_proto(self._context.offer, linears=self._linears, num_threads=self._threads)

    async def GetStatus(  # noqa: N802
        self, request: pb.PrefillServiceGetStatusRequest, context: Context
    ) -> pb.PrefillServiceGetStatusResponse:
        """Tell what this service is doing now, also while it ends."""
        return status_to_proto(self._context, self.peers, self._engine_loop.running, self._calls())

    async def Transfer(self, request_iterator: Any, context: Context) -> None:  # noqa: N802
        """Serve one session until either side ends it."""
        self._refuse_when_shutting_down()
        peer = DecodePeer(self._next_number, self._context, self._forget)
        self._next_number += 1
        self._peers[peer.number] = peer
        watch = SilenceWatch(self._context.silence_limit_s, self._context.clock)
        try:
            with listed(self._streams):
                await first_end(
                    self._write(peer, context), self._read(peer, context, watch), self._watch(peer, watch)
                )
        finally:
            peer.close()

    @property
    def peers(self) -> tuple[DecodePeer, ...]:
        """Peers whose slab is mapped or whose stream is open."""
        return tuple(self._peers.values())

    @property
    def totals(self) -> Totals:
        """Counts since start."""
        return self._context.totals

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when what sessions, queue and totals count does not agree.

        Run whenever the last job has ended: a fault is found at once, and costs no prompt its time.
        """
        for peer in self.peers:
            peer.check_integrity()
        self._context.slabs.check_integrity()
        entered = self._context.slabs.statistics().num_bytes
        held = sum(peer.slab_bytes for peer in self.peers)
        # More may have entered: it is being mapped.
        if held > entered:
            raise InvariantViolation(f"sessions hold {held} slab bytes, {entered} have entered")
        self._context.queue.check_integrity()
        self._context.totals.check_integrity(sum(peer.num_unanswered for peer in self.peers))

    def shut_down(self) -> None:
        """Take no new session and no new job, and ask every peer to leave."""
        self._is_shutting_down = True
        for peer in self.peers:
            peer.leave()

    async def wait_left(self, limit_s: float) -> None:
        """Wait until every peer has heard how its jobs ended and left, at most `limit_s` seconds."""
        if self._streams:
            await asyncio.wait(self._streams, timeout=limit_s)

    async def end_streams(self, limit_s: float) -> None:
        """End the streams of peers that have not left, after the last word; within `limit_s`."""
        for peer in self.peers:
            peer.end_stream()
        await self.wait_left(limit_s)

    def _refuse_when_shutting_down(self) -> None:
        if self._is_shutting_down:
            raise ShuttingDown("the prefill service is shutting down")

    async def _read(self, peer: DecodePeer, context: Context, watch: SilenceWatch) -> None:
        """Feed the session until the peer half-closes."""
        # One message is carried out before the next is read, so that a peer which floods us waits in its own
        # transport, and nothing is heard while the slab is being mapped.
        request = await read_first(context)
        while request is not grpc.aio.EOF:
            watch.heard()
            peer.receive(decode_message_from_proto(request))
            await peer.map_slab()
            await peer.wait_heard()
            request = await context.read()

    async def _watch(self, peer: DecodePeer, watch: SilenceWatch) -> None:
        """Raise `PeerLost` when decode has been silent for too long; it pings an open session."""
        while True:
            await asyncio.sleep(watch.interval_s)
            # A large slab takes seconds to map, and nobody reads meanwhile: that silence is ours.
            if peer.is_mapping:
                watch.heard()
            if watch.look():
                raise PeerLost(f"decode was silent for {watch.limit_s:g} s")

    async def _write(self, peer: DecodePeer, context: Context) -> None:
        while (message := await peer.next_message()) is not None:
            await context.write(to_proto(message))

    def _forget(self, peer: DecodePeer) -> None:
        self._peers.pop(peer.number, None)
        logger.info("session.idle", extra=log_fields(session=peer.number))
