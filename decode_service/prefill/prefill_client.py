"""Keeps a session with one prefill service open: connects, connects again with backoff, and remembers.

Theory of operation: `run` makes one connection after the other until cancelled. A peer that is down is tried
again after a short, growing pause; one that does not fit after a longer one, since only a restart can change
it. A session that takes no more transfers because one of them does not drain is left to finish, and another
one is opened beside it. Connections are kept until their slab is unmapped.

    connection 1: open --- a transfer does not drain --- finishes its others --- closed, slab abandoned
    connection 2:                                     open -------------------------------------------->

Ownership: one `PrefillPeer` per address; owns its connections and the tasks that run them. Event loop only.
Not here: the stream of a session (`peer_connection.py`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from dataclasses import dataclass

from common.errors import Difference, KVSpanError, NegotiationError, RemoteProtocolError
from common.session.identity import EngineFacts
from common.telemetry.logging import log_fields
from common.wire.failure import RemoteFailure
from decode_service.prefill.peer_connection import PeerConfig, PeerConnection
from decode_service.prefill.peer_problem import (
    FINISHING,
    LEAVING,
    MAX_DIFFERENCES,
    NOT_CONNECTED,
    PeerProblem,
    problem_of,
)
from decode_service.prefill.peer_session import PeerSession, SessionContext
from decode_service.prefill.remote_place import RemotePlace
from decode_service.prefill.session_totals import SessionTotals, totals_of
from decode_service.prefill.slab_refusals import SlabRefusals

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pause after a peer was lost or could not be reached; doubles up to the longest."""

REFUSED_PAUSE_S = 5.0
"""Pause after a peer that does not fit; a slab is made for it more rarely (`slab_refusals.py`)."""

MAX_FINISHING = 1
"""Connections to one peer that only finish: each keeps a slab, and a peer may never drain."""


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

    engine: EngineFacts | None
    """What computes there; None while there is no session."""

    noted: tuple[Difference, ...]
    """What differs and may, in the session that is open."""


class PrefillPeer:
    """One prefill service, by address."""

    def __init__(self, target: str, config: PeerConfig, context: SessionContext) -> None:
        self._target = target
        self._config = config
        self._context = context
        self._problem: PeerProblem | None = NOT_CONNECTED
        self._logged_problem: PeerProblem | None = None
        # Invariant: the last problem that was logged since a session was open.
        self._is_refused = False
        self._is_closed = False
        self._refusals = SlabRefusals(config.clock)
        self._boot_id = ""
        # Invariant: the life that was asked last; empty once it cannot be reached any more.
        self._current: PeerConnection | None = None
        self._kept: list[PeerConnection] = []
        # Invariant: has every connection of which something is left, the current one included.
        self._tasks: set[asyncio.Task[None]] = set()
        # Invariant: has the task of every connection that has not ended.
        self._num_sessions = 0
        self._gone = SessionTotals()
        # Invariant: those of the connections that are gone.

    @property
    def target(self) -> str:
        """Address of the peer."""
        return self._target

    @property
    def session(self) -> PeerSession | None:
        """The session in which transfers may start now, if there is one."""
        session = self._current.session if self._current else None
        return session if session is not None and session.is_open and not session.is_leaving else None

    @property
    def place(self) -> RemotePlace | None:
        """That session as a place for prompts."""
        return self._current.place if self._current and self.session else None

    @property
    def problem(self) -> PeerProblem | None:
        """Why there is no session for new transfers; None when there is."""
        if self.session:
            return None
        if self._is_passed:
            return FINISHING
        lost = self._current.lost if self._current else None
        return self._problem or (problem_of(lost) if lost else LEAVING)

    @property
    def is_reopening(self) -> bool:
        """Whether it was well when its session was passed, and the next one is opened now.

        Until that has failed once, or for as long as those that finish are too many: so it is true for no
        longer than a connection takes.
        """
        is_next = self._current is not None and not self._is_passed
        has_room = len(self._tasks) - is_next <= MAX_FINISHING
        return has_room and (self._is_passed or self._problem is FINISHING)

    def statistics(self) -> PeerStatistics:
        """Return what an operator asks about this peer."""
        sessions = self._sessions()
        slabs = [one.slots.statistics() for one in sessions if not one.is_closed]
        return PeerStatistics(
            target=self._target,
            state=self._state(),
            boot_id=(self._current.boot_id if self._current else "") or self._boot_id,
            problem=self.problem,
            num_sessions=self._num_sessions,
            num_transfers=sum(one.statistics().num_transfers for one in sessions),
            slab_leased_bytes=sum(slab.leased_bytes for slab in slabs),
            slab_total_bytes=sum(slab.capacity_bytes for slab in slabs),
            num_slots=sum(slab.num_leased for slab in slabs),
            totals=sum(map(totals_of, sessions), self._gone),
            engine=session.welcome.engine if (session := self.session) else None,
            noted=session.noted[:MAX_DIFFERENCES] if session else (),
        )

    def shut_doors(self) -> None:
        """Remove the name of a slab that the peer has not got yet; the process is about to end."""
        for session in self._sessions():
            session.slots.shut_door()

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when a session contradicts itself."""
        for session in self._sessions():
            session.check_integrity()

    def check_idle(self) -> None:
        """Raise `InvariantViolation` when a session keeps what only a live request may keep."""
        for session in self._sessions():
            session.check_idle()

    async def run(self) -> None:
        """Keep a session open until cancelled."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                opened_before = self._num_sessions
                await self._connect()
                pause_s = FIRST_PAUSE_S if self._num_sessions > opened_before else pause_s * 2
                pause_s = min(pause_s, LONGEST_PAUSE_S)
                await asyncio.sleep(REFUSED_PAUSE_S if self._is_refused else pause_s)
        finally:
            self._is_closed = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self) -> None:
        """Have a connection until it has ended, or only finishes what runs in it."""
        while len(self._tasks) > MAX_FINISHING:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        connection = PeerConnection(self._target, self._config, self._context, self._refusals, self._opened)
        self._current = connection
        self._kept.append(connection)
        self._is_refused = False
        task = asyncio.create_task(self._run(connection), name=f"connection-{self._target}")
        self._tasks.add(task)
        await connection.wait_passed()
        self._current = None
        if connection.has_ended:
            await task
        else:
            self._problem = FINISHING
            logger.warning("session.finishing", extra=log_fields(target=self._target))
            # Nobody waits for it; what it raises reaches the service by the loop.
            task.add_done_callback(_require_end)

    async def _run(self, connection: PeerConnection) -> None:
        try:
            error = await connection.run()
        finally:
            self._tasks.discard(asyncio.current_task())
            self._forget_gone()
        # One that only finished says nothing of the peer: its end was decided when it was passed.
        if self._current is connection:
            self._boot_id = connection.boot_id
            if connection.session is not None:
                self._refusals.note(connection.boot_id, error)
            self._note(error)
            # It was ended here, since nothing was left to finish in it: the peer is as well as before.
            if connection.session is not None and connection.session.is_retired:
                self._problem = FINISHING

    def _opened(self, connection: PeerConnection) -> None:
        session = connection.session
        assert session is not None
        self._boot_id = connection.boot_id
        self._problem = self._logged_problem = None
        self._num_sessions += 1
        fields = log_fields(
            target=self._target,
            peer_boot_id=self._boot_id,
            slab=session.slots.name,
            engine=session.welcome.engine.name,
            origin=session.welcome.engine.origin.value,
        )
        logger.info("session.opened", extra=fields)
        if session.noted:
            told = "; ".join(map(str, session.noted[:MAX_DIFFERENCES]))
            logger.warning("numerics.differ", extra=log_fields(target=self._target, differences=told))
        self._context.on_change()

    def _forget_gone(self) -> None:
        gone = [one for one in self._kept if one.is_gone]
        self._kept = [one for one in self._kept if one not in gone]
        sessions = [one.session for one in gone if one.session is not None]
        self._gone = sum(map(totals_of, sessions), self._gone)

    @property
    def _is_passed(self) -> bool:
        """Whether the current session only finishes, and the next turn of `run` passes it."""
        session = self._current.session if self._current else None
        return session is not None and session.is_retired

    def _sessions(self) -> list[PeerSession]:
        return [one.session for one in self._kept if one.session is not None]

    def _state(self) -> PeerState:
        if self._is_closed:
            return PeerState.CLOSED
        session = self._current.session if self._current else None
        if session is None or session.is_closed:
            return PeerState.REFUSED if self._is_refused else PeerState.CONNECTING
        if not session.is_open:
            return PeerState.GREETING
        return PeerState.LEAVING if session.is_leaving else PeerState.OPEN

    def _note(self, error: KVSpanError | RemoteFailure) -> None:
        """Remember and log why there is no session; the same problem is logged once."""
        was_reopening = self.is_reopening
        self._is_refused = isinstance(error, NegotiationError | RemoteProtocolError)
        self._boot_id = self._boot_id if self._is_refused else ""
        problem = self._problem = problem_of(error)
        if was_reopening:
            self._context.on_change()  # whoever waited for this session hears that there is none
        if problem == self._logged_problem:
            return
        self._logged_problem = problem
        fields = log_fields(
            target=self._target, state=self._state().value, reason=problem.reason, problem=problem.text
        )
        logger.warning("session.failed", extra=fields)


def _require_end(task: asyncio.Task[None]) -> None:
    """Raise what a connection ended with when that is a broken invariant."""
    if not task.cancelled():
        task.result()
