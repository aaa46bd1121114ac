"""Keeps one session with a prefill service alive: connects, greets, reconnects with backoff.

Theory of operation: `run` repeats attempts until cancelled. An attempt asks for the capabilities first, so
that a peer that does not fit is refused, with every difference named, before a slab is made; only whether
the slab is shared shows later. A peer that is down is tried again after a short, growing pause; one that does
not fit after a longer one, since only a restart can change it. Ended sessions are kept until their slab is
unmapped.

Ownership: one `PrefillPeer` per address; owns the channel and the sessions it opened. Event loop only.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from common.errors import (
    InvariantViolation,
    KVSpanError,
    LeaseExpired,
    NegotiationError,
    PeerLost,
    PeerUnavailable,
    RemoteProtocolError,
)
from common.kv.spans import SPAN_LAYOUT
from common.runtime.clock import Clock
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
from decode_service.prefill.peer_problem import LEAVING, NOT_CONNECTED, PeerProblem, problem_of
from decode_service.prefill.peer_session import PeerSession, SessionContext
from decode_service.prefill.session_totals import SessionTotals, totals_of
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1 import transfer_pb2_grpc

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Seconds from connecting to Welcome, mapping the slab included."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pause after a peer was lost or could not be reached; doubles up to the longest."""

REFUSED_PAUSE_S = 5.0
"""Pause after a peer that does not fit."""


class PeerState(enum.Enum):
    """How the peer stands with us."""

    CONNECTING = "connecting"
    GREETING = "greeting"
    OPEN = "open"
    LEAVING = "leaving"
    """Open, and none may start: the peer shuts down."""

    REFUSED = "refused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """What every session of this service is opened with; `hello` has no slab yet."""

    make_hello: Callable[[SlabHandle], Hello]
    slab_dir: Path
    slab_bytes: int
    boot_id: str
    silence_limit_s: float
    clock: Clock


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """What an operator asks about a peer."""

    target: str
    state: PeerState
    boot_id: str
    """Of the life that a session stands with or that was refused; else empty."""

    problem: PeerProblem | None
    """Why it is not open; None when it is."""

    num_sessions: int
    """Opened since start."""

    num_transfers: int
    """Not drained, ended sessions included."""

    slab_leased_bytes: int
    slab_total_bytes: int
    num_slots: int
    totals: SessionTotals
    """Since start, ended sessions included."""


class PrefillPeer:
    """One prefill service, by address."""

    def __init__(self, target: str, config: PeerConfig, context: SessionContext) -> None:
        self._target = target
        self._config = config
        self._context = context
        self._state = PeerState.CONNECTING
        self._problem: PeerProblem | None = NOT_CONNECTED
        self._logged_problem: PeerProblem | None = None
        # Invariant: the last problem that was logged since a session was open.
        self._boot_id = ""
        # Invariant: the life that was asked last; empty once it cannot be reached any more.
        self._session: PeerSession | None = None
        self._ended: list[PeerSession] = []
        # Invariant: sessions that are closed and not yet unmapped.
        self._num_sessions = 0
        self._gone = SessionTotals()
        # Invariant: those of the sessions that are gone.

    @property
    def target(self) -> str:
        """Address of the peer."""
        return self._target

    @property
    def session(self) -> PeerSession | None:
        """The session in which transfers may start now, if there is one."""
        session = self._session
        return session if session is not None and session.is_open and not session.is_leaving else None

    @property
    def problem(self) -> PeerProblem | None:
        """Why there is no session for new transfers; None when there is."""
        if self.session:
            return None
        return self._problem or LEAVING

    def statistics(self) -> PeerStatistics:
        """Return what an operator asks about this peer."""
        sessions = [*self._ended, *([self._session] if self._session else [])]
        transfers = sum(session.statistics().num_transfers for session in sessions)
        slab = self._session.slots.statistics() if self._session else None
        is_open = self._session is not None and self._session.is_open
        return PeerStatistics(
            target=self._target,
            state=PeerState.LEAVING if is_open and not self.session else self._state,
            boot_id=self._boot_id,
            problem=self.problem,
            num_sessions=self._num_sessions,
            num_transfers=transfers,
            slab_leased_bytes=slab.leased_bytes if slab else 0,
            slab_total_bytes=slab.capacity_bytes if slab else 0,
            num_slots=slab.num_leased if slab else 0,
            totals=sum(map(totals_of, sessions), self._gone),
        )

    def unlink_slab(self) -> None:
        """Remove the name of a slab that the peer has not mapped yet; the process is about to end."""
        if self._session is not None:
            self._session.slots.unlink()

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when a session contradicts itself."""
        for session in [*self._ended, *([self._session] if self._session else [])]:
            session.check_integrity()

    async def run(self) -> None:
        """Keep a session open until cancelled."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                opened_before = self._num_sessions
                await self._attempt()
                pause_s = FIRST_PAUSE_S if self._num_sessions > opened_before else pause_s * 2
                pause_s = min(pause_s, LONGEST_PAUSE_S)
                is_refused = self._state is PeerState.REFUSED
                await asyncio.sleep(REFUSED_PAUSE_S if is_refused else pause_s)
        finally:
            self._state = PeerState.CLOSED

    async def _attempt(self) -> None:
        """Connect, serve one session to its end, and note why it ended."""
        try:
            async with make_channel(self._target) as channel:
                stub = transfer_pb2_grpc.PrefillServiceStub(channel)
                await self._check_peer(stub)
                await self._serve(stub)
        except grpc.RpcError as error:
            self._note(from_rpc_error(error))
        except (KVSpanError, RemoteFailure) as error:
            self._note(error)
        except TimeoutError:
            self._note(LeaseExpired(f"no Welcome within {HANDSHAKE_S:.0f} s"))
        except InvariantViolation:
            raise
        except Exception as error:
            # A bug that this peer found must not take the sessions of the others with it.
            logger.exception("session.broken", extra=log_fields(target=self._target))
            self._note(PeerLost(f"the session ended with {type(error).__name__}: {error}"))

    async def _check_peer(self, stub: transfer_pb2_grpc.PrefillServiceStub) -> None:
        """Raise `NegotiationError` when the capabilities show that the peer does not fit."""
        self._state = PeerState.CONNECTING
        request = pb.PrefillServiceGetCapabilitiesRequest()
        try:
            answer = await stub.GetCapabilities(request, wait_for_ready=True, timeout=HANDSHAKE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PeerUnavailable("it does not answer") from error
            raise
        offer = capabilities_from_proto(require_readable(answer))
        self._boot_id = offer.boot_id
        negotiate(self._config.make_hello(SlabHandle("", 0, SPAN_LAYOUT)), offer)

    async def _serve(self, stub: transfer_pb2_grpc.PrefillServiceStub) -> None:
        """Open a session and serve it until it ends; raises why it ended."""
        config = self._config
        slab = await make_slab(config)
        hello = config.make_hello(SlabHandle(slab.name, slab.size_bytes, SPAN_LAYOUT))
        session = self._session = PeerSession(hello, slab, self._context)
        call = stub.Transfer()
        writer = asyncio.create_task(_write(session, call), name="session-writer")
        lost: KVSpanError = PeerLost("the session with the prefill service was closed here")
        try:
            self._state = PeerState.GREETING
            session.greet()
            watch = SilenceWatch(config.silence_limit_s, config.clock)
            await first_end(self._read(session, call, watch), self._watch(session, watch))
            lost = PeerLost("the prefill service ended the session")
            raise lost
        except grpc.RpcError as error:
            # The text of a status may name sockets; these words go to the clients of all transfers.
            reason = problem_of(from_rpc_error(error)).reason
            lost = PeerLost(f"the session with the prefill service broke: {reason}")
            raise
        except KVSpanError as error:
            lost = PeerLost(f"the session with the prefill service ended: {error}")
            raise
        finally:
            self._end(session, lost)
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, session: PeerSession, call: TransferCall, watch: SilenceWatch) -> None:
        """Feed the session until the peer ends the stream; raises the status when that is not OK."""
        async with asyncio.timeout(HANDSHAKE_S) as handshake:
            async for response in received(call):
                watch.heard()
                session.receive(prefill_message_from_proto(response))
                if self._state is not PeerState.OPEN and session.is_open:
                    handshake.reschedule(None)
                    self._opened(session)

    async def _watch(self, session: PeerSession, watch: SilenceWatch) -> None:
        """Ping an open session; raises `PeerLost` when the peer has been silent for too long."""
        while True:
            await asyncio.sleep(watch.interval_s)
            if session.is_open and watch.look():
                raise PeerLost(f"it was silent for {watch.limit_s:.1f} s")
            session.transfers.check_drained()
            session.ping()

    def _opened(self, session: PeerSession) -> None:
        self._state, self._boot_id = PeerState.OPEN, session.welcome.boot_id
        self._problem = self._logged_problem = None
        self._num_sessions += 1
        fields = log_fields(target=self._target, peer_boot_id=self._boot_id, slab=session.slots.name)
        logger.info("session.opened", extra=fields)
        self._context.on_change()

    def _end(self, session: PeerSession, lost: KVSpanError) -> None:
        self._session = None
        self._ended.append(session)
        session.close(lost)
        gone = [one for one in self._ended if one.slots.is_unmapped]
        self._ended = [one for one in self._ended if one not in gone]
        self._gone = sum(map(totals_of, gone), self._gone)

    def _note(self, error: KVSpanError | RemoteFailure) -> None:
        """Remember and log why there is no session; the same problem is logged once."""
        is_refused = isinstance(error, NegotiationError | RemoteProtocolError)
        self._state = PeerState.REFUSED if is_refused else PeerState.CONNECTING
        self._boot_id = self._boot_id if is_refused else ""
        problem = self._problem = problem_of(error)
        if problem == self._logged_problem:
            return
        self._logged_problem = problem
        fields = log_fields(
            target=self._target, state=self._state.value, reason=problem.reason, problem=problem.text
        )
        logger.warning("session.failed", extra=fields)


async def make_slab(config: PeerConfig) -> SlabSegment:
    """Make a slab on another thread: a large one takes longer than other sessions may be silent."""
    make = partial(SlabSegment.create, config.slab_dir, config.slab_bytes, config.boot_id)
    return await make_in_thread(make, SlabSegment.close)


TransferCall = grpc.aio.StreamStreamCall[pb.TransferRequest, pb.TransferResponse]


async def received(call: TransferCall) -> AsyncIterator[pb.TransferResponse]:
    """Yield every response until the peer ends the stream; raises the status when that is not OK.

    Raises: `RemoteProtocolError` for bytes that are no message.
    """
    # Not `call.read()`: after a write that failed it drops what has arrived and was not read.
    async for response in call:
        yield require_readable(response)


async def _write(session: PeerSession, call: TransferCall) -> None:
    """Send what the session wants to say, then half-close."""
    while (message := await session.next_message()) is not None:
        await call.write(to_proto(message))
    await call.done_writing()
