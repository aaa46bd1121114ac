"""One connection to a prefill service: asks who it is, opens a session and serves it to its end.

Theory of operation: the capabilities are asked for first, so that a peer that does not fit is refused, with
every difference named, before a slab is made; only whether the slab is shared shows later. A session one of
whose transfers does not drain takes no more (`PeerSession.check_drained`): `wait_passed` says so, and another
connection may be opened beside this one, which goes on until its other transfers have ended.

Ownership: made by `PrefillPeer`, which runs it; owns its channel and its session. Event loop only.
Not here: when to connect, and what is remembered of a peer (`prefill_client.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from common.errors import InvariantViolation, KVSpanError, LeaseExpired, PeerLost, PeerUnavailable
from common.kv.spans import SPAN_LAYOUT
from common.runtime.clock import Clock
from common.runtime.memory import require_room
from common.runtime.silence import SilenceWatch
from common.runtime.tasks import first_end, make_in_thread
from common.session.messages import Hello, SlabHandle
from common.session.negotiation import negotiate
from common.slab.segment import SlabSegment
from common.telemetry.logging import log_fields
from common.wire.channel import make_channel
from common.wire.convert import capabilities_from_proto, prefill_message_from_proto, to_proto
from common.wire.decoding import require_readable
from common.wire.failure import RemoteFailure, from_rpc_error
from common.wire.responses import responses_of
from decode_service.prefill.peer_problem import problem_of, silence_of
from decode_service.prefill.peer_session import PeerSession, SessionContext
from decode_service.prefill.remote_place import RemotePlace
from decode_service.prefill.slab_refusals import SlabRefusals
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1 import transfer_pb2_grpc

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Seconds from connecting to Welcome, mapping the slab included."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """What every session of this service is opened with; `hello` has no slab yet."""

    make_hello: Callable[[SlabHandle], Hello]
    slab_dir: Path
    slab_bytes: int
    boot_id: str
    silence_limit_s: float
    clock: Clock


class PeerConnection:
    """One try to have a session with a prefill service, and that session."""

    def __init__(
        self,
        target: str,
        config: PeerConfig,
        context: SessionContext,
        refusals: SlabRefusals,
        on_opened: Callable[[PeerConnection], None],
    ) -> None:
        """Connect to nobody yet; `on_opened` is called once the peer has welcomed us.

        `refusals` are those of earlier connections to this peer.
        """
        self._target = target
        self._config = config
        self._context = context
        self._refusals = refusals
        self._on_opened = on_opened
        self._boot_id = ""
        self._session: PeerSession | None = None
        self._place: RemotePlace | None = None
        self._has_passed = asyncio.Event()
        self._has_ended = False
        self._lost: KVSpanError | None = None

    @property
    def boot_id(self) -> str:
        """The life of the peer, once it has answered."""
        return self._boot_id

    @property
    def session(self) -> PeerSession | None:
        """The session, open or not, once there is a slab for it."""
        return self._session

    @property
    def place(self) -> RemotePlace | None:
        """The session as a place for prompts."""
        return self._place

    @property
    def lost(self) -> KVSpanError | None:
        """Why the session has ended, in words for the clients of its transfers; None before."""
        return self._lost

    @property
    def has_ended(self) -> bool:
        """Whether `run` is over."""
        return self._has_ended

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left: the stream has ended, and no copy out of its slab is under way."""
        return self._has_ended and (self._session is None or self._session.slots.is_unmapped)

    async def wait_passed(self) -> None:
        """Wait until this has ended, or only finishes what runs in it: then it is time for another one."""
        await self._has_passed.wait()

    async def run(self) -> KVSpanError | RemoteFailure:
        """Connect, serve one session to its end, and return why it ended."""
        try:
            async with make_channel(self._target) as channel:
                stub = transfer_pb2_grpc.PrefillServiceStub(channel)
                await self._check_peer(stub)
                return await self._serve(stub)
        except grpc.RpcError as error:
            return from_rpc_error(error)
        except (KVSpanError, RemoteFailure) as error:
            return error
        except TimeoutError:
            return LeaseExpired(f"no Welcome within {HANDSHAKE_S:g} s")
        except InvariantViolation:
            raise
        except Exception as error:
            # A bug that this peer found must not take the sessions of the others with it.
            logger.exception("session.broken", extra=log_fields(target=self._target))
            return PeerLost(f"the session ended with {type(error).__name__}: {error}")
        finally:
            self._has_ended = True
            self._has_passed.set()

    async def _check_peer(self, stub: transfer_pb2_grpc.PrefillServiceStub) -> None:
        """Raise `NegotiationError` when the peer does not fit, or would not take a slab again."""
        request = pb.PrefillServiceGetCapabilitiesRequest()
        try:
            answer = await stub.GetCapabilities(request, wait_for_ready=True, timeout=HANDSHAKE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PeerUnavailable(silence_of(self._target)) from error
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise PeerUnavailable("what answers there is no prefill service") from error
            raise
        offer = capabilities_from_proto(require_readable(answer))
        self._boot_id = offer.boot_id
        negotiate(self._config.make_hello(SlabHandle("", 0, SPAN_LAYOUT)), offer)
        self._refusals.check(offer.boot_id)

    async def _serve(self, stub: transfer_pb2_grpc.PrefillServiceStub) -> PeerLost:
        """Open a session and serve it until it ends; returns or raises why it ended."""
        config = self._config
        slab = await make_slab(config)
        hello = config.make_hello(SlabHandle(slab.name, slab.size_bytes, SPAN_LAYOUT))
        session = self._session = PeerSession(hello, slab, self._context)
        self._place = RemotePlace(self._target, session)
        call = stub.Transfer()
        writer = asyncio.create_task(_write(session, call), name="session-writer")
        lost: KVSpanError = PeerLost("the session with the prefill service was closed here")
        try:
            session.greet()
            watch = SilenceWatch(config.silence_limit_s, config.clock)
            await first_end(self._read(session, call, watch), self._watch(session, watch))
            lost = PeerLost("the prefill service ended the session")
            return lost
        except grpc.RpcError as error:
            # The text of a status may name sockets; these words go to the clients of all transfers.
            reason = problem_of(from_rpc_error(error)).reason
            lost = PeerLost(f"the session with the prefill service broke: {reason}")
            raise
        except KVSpanError as error:
            lost = PeerLost(f"the session with the prefill service ended: {error}")
            raise
        finally:
            self._lost = lost
            session.close(lost)
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, session: PeerSession, call: TransferCall, watch: SilenceWatch) -> None:
        """Feed the session until the peer ends the stream; raises the status when that is not OK."""
        async with asyncio.timeout(HANDSHAKE_S) as handshake:
            async for response in responses_of(call):
                watch.heard()
                session.receive(prefill_message_from_proto(response))
                if handshake.when() is not None and session.is_open:
                    handshake.reschedule(None)
                    self._boot_id = session.welcome.boot_id
                    self._on_opened(self)

    async def _watch(self, session: PeerSession, watch: SilenceWatch) -> None:
        """Ping an open session; raises `PeerLost` when the peer has been silent for too long."""
        while True:
            await asyncio.sleep(watch.interval_s)
            if session.is_open and watch.look():
                raise PeerLost(f"it was silent for {watch.limit_s:g} s")
            session.check_drained()
            if session.is_retired:
                self._has_passed.set()
            session.ping()


async def make_slab(config: PeerConfig) -> SlabSegment:
    """Make a slab on another thread: a large one takes longer than other sessions may be silent.

    Raises: `ConfigError` when there is no room for it: without asking first, the kernel would end a process.
    """
    require_room("slab_bytes", config.slab_bytes, "it takes", config.slab_bytes)
    make = partial(SlabSegment.create, config.slab_dir, config.slab_bytes, config.boot_id)
    return await make_in_thread(make, SlabSegment.close)


TransferCall = grpc.aio.StreamStreamCall[pb.TransferRequest, pb.TransferResponse]


async def _write(session: PeerSession, call: TransferCall) -> None:
    """Send what the session wants to say, then half-close."""
    while (message := await session.next_message()) is not None:
        await call.write(to_proto(message))
    await call.done_writing()
