"""The decode service's half of a session with one prefill service.

Theory of operation: `SESSION_TRANSITIONS` rules the session, `transfer_states.TRANSITIONS` each transfer.
A message about one transfer can only harm that transfer; a message the session does not allow at all
(anything before Welcome, a second Welcome) raises `RemoteProtocolError` and the adapter closes the
session. So does too much that means nothing, or fails transfers (`strays.py`). Transfers are keyed by an id
that decode chose, never by the client's name for the request.

    NEW --greet--> GREETING --welcome--> OPEN --go_away--> LEAVING --last_ended--> LEFT --close--> CLOSED
     +---- close ----+------- close ------+------- close -----+------------------------------------->

A peer that shuts down says GoAway, or of a prompt that it takes none. Decode then starts nothing, and
half-closes once the peer has said of each transfer how it ended. So the peer ends the stream after everything
it said was read, and no message of ours meets a closed stream, which would lose what was not read yet.

Ownership: one object per stream, used on the event loop only.
Not here: gRPC, memory, threads, time (`decode_service/prefill/peer_connection.py`); reserving and publishing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.errors import (
    Difference,
    InvariantViolation,
    KVSpanError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    StaleGeneration,
)
from common.kv.coverage import Coverage
from common.kv.geometry import KVGeometry
from common.session.actions import (
    DecodeAction,
    HalfClose,
    Send,
    SessionLeaving,
    SessionOpened,
    SlabIdle,
    TransferDrained,
)
from common.session.decode_transfer import DecodeTransfer
from common.session.messages import (
    GoAway,
    Hello,
    Ping,
    Pong,
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillMessage,
    SpanSealed,
    StartPrefill,
    Welcome,
)
from common.session.negotiation import differences_of, verify_welcome
from common.session.strays import Strays
from common.session.transfer_states import BEYOND_PEER, TERMINAL


class SessionState(enum.Enum):
    """Where a session is."""

    NEW = "new"
    GREETING = "greeting"
    OPEN = "open"
    LEAVING = "leaving"
    """The peer starts nothing more; live transfers go on."""

    LEFT = "left"
    """We have said our last word."""

    CLOSED = "closed"


class SessionEvent(enum.Enum):
    """What can happen to a session as a whole."""

    GREET = "greet"
    WELCOME = "welcome"
    GO_AWAY = "go_away"
    LAST_ENDED = "last_ended"
    CLOSE = "close"


_S, _E = SessionState, SessionEvent
SESSION_TRANSITIONS: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (_S.NEW, _E.GREET): _S.GREETING,
    (_S.GREETING, _E.WELCOME): _S.OPEN,
    (_S.OPEN, _E.GO_AWAY): _S.LEAVING,
    (_S.LEAVING, _E.LAST_ENDED): _S.LEFT,
    (_S.NEW, _E.CLOSE): _S.CLOSED,
    (_S.GREETING, _E.CLOSE): _S.CLOSED,
    (_S.OPEN, _E.CLOSE): _S.CLOSED,
    (_S.LEAVING, _E.CLOSE): _S.CLOSED,
    (_S.LEFT, _E.CLOSE): _S.CLOSED,
}

WELCOMED = frozenset({_S.OPEN, _S.LEAVING, _S.LEFT})
"""States in which the peer may speak of transfers."""


@dataclass(frozen=True, slots=True)
class DecodeSessionStatistics:
    """Counts of one session."""

    state: SessionState
    num_transfers: int
    """Started or reserved, and not drained."""

    unknown_messages: int
    """Named no transfer of this session: late or wrong, ignored."""

    late_events: int
    """Came after the outcome of their transfer was decided."""

    duplicates: int
    """Exact repetitions of a span."""


class DecodeSession:
    """State machine of one session; every method returns the actions to carry out."""

    def __init__(self, hello: Hello, nonce: bytes) -> None:
        self._hello = hello
        self._nonce = nonce
        self._state = SessionState.NEW
        self._welcome: Welcome | None = None
        self._transfers: dict[int, DecodeTransfer] = {}
        # Invariant: holds every transfer that is not drained; a drained one is dropped at once.
        self._highest_id = 0
        # Invariant: every id ever begun is at most this; ids are never used twice.
        self._strays = Strays()
        self._pings = 0
        self._pongs = 0
        self._unknown = 0
        self._late = 0
        self._duplicates = 0

    @property
    def state(self) -> SessionState:
        """Where the session is."""
        return self._state

    @property
    def welcome(self) -> Welcome | None:
        """What the peer said of itself, once it has."""
        return self._welcome

    @property
    def noted(self) -> tuple[Difference, ...]:
        """What of the peer differs and may; nothing before Welcome, nor where numerics have to be equal."""
        if self._welcome is None:
            return ()
        # What is left of a session that is open is what its policy allows.
        return differences_of(self._hello.identity, self._welcome.identity)

    @property
    def geometry(self) -> KVGeometry:
        """Of the KV that is handed over: ours, whatever prefill has."""
        return self._hello.identity.geometry

    @property
    def num_transfers(self) -> int:
        """How many transfers are started or reserved, and not drained; costs nothing, unlike `statistics`."""
        return len(self._transfers)

    def transfer(self, transfer_id: int) -> DecodeTransfer:
        """Return a transfer that is not drained; `KeyError` otherwise."""
        return self._transfers[transfer_id]

    def statistics(self) -> DecodeSessionStatistics:
        """Return the counts now."""
        live = [transfer.statistics() for transfer in self._transfers.values()]
        return DecodeSessionStatistics(
            self._state,
            self.num_transfers,
            self._unknown,
            self._late + sum(one.late_events for one in live),
            self._duplicates + sum(one.duplicates for one in live),
        )

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when the table of transfers contradicts itself."""
        for transfer_id, transfer in self._transfers.items():
            if transfer.transfer_id != transfer_id or transfer_id > self._highest_id:
                raise InvariantViolation(f"transfer {transfer_id} is filed wrongly")
            if transfer.state in TERMINAL:
                raise InvariantViolation(f"transfer {transfer_id} is drained and still listed")
            # What needs nothing of the peer any more is finished and published after the session, too.
            if self._state is SessionState.CLOSED and transfer.state not in BEYOND_PEER:
                raise InvariantViolation(f"transfer {transfer_id} waits for the peer of a closed session")

    def greet(self) -> tuple[DecodeAction, ...]:
        """Send Hello."""
        self._step(SessionEvent.GREET)
        return (Send(self._hello),)

    def begin(self, start: StartPrefill, coverage: Coverage) -> tuple[DecodeAction, ...]:
        """Start a transfer whose pages and slot are already held (rule 1)."""
        if self._state is not SessionState.OPEN:
            raise LocalProtocolError(
                "a transfer needs an open session", state=self._state.value, event="start"
            )
        if start.transfer_id <= self._highest_id:
            raise LocalProtocolError(f"transfer id {start.transfer_id} was used before")
        self._highest_id = start.transfer_id
        self._strays.allow()  # it may be accepted after it was given up
        vocab_size = self._hello.identity.geometry.vocab_size
        transfer = DecodeTransfer(start, coverage, vocab_size, self._strays)
        self._transfers[start.transfer_id] = transfer
        return transfer.start()

    def abort(self, transfer_id: int, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Give a transfer up; nothing happens when it is drained already."""
        transfer = self._transfers.get(transfer_id)
        return self._settle(transfer, transfer.abort(error)) if transfer else ()

    def import_finished(self, transfer_id: int, sequence: int) -> tuple[DecodeAction, ...]:
        """The copy of one span has ended and its digest matched."""
        transfer = self._transfers[transfer_id]
        return self._settle(transfer, transfer.import_finished(sequence))

    def import_failed(self, transfer_id: int, sequence: int, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """The copy of one span has ended badly."""
        transfer = self._transfers[transfer_id]
        return self._settle(transfer, transfer.import_failed(sequence, error))

    def published(self, transfer_id: int) -> tuple[DecodeAction, ...]:
        """The reservation of this transfer was published."""
        transfer = self._transfers[transfer_id]
        return self._settle(transfer, transfer.published())

    def close(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """End the session: what still needs the peer fails with `error`.

        The slab is abandoned: never leased from again, and idle once the last local copy out of it has ended
        and all that is complete was published or given up.
        """
        if self._state is SessionState.CLOSED:
            return ()
        self._step(SessionEvent.CLOSE)
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            actions += self._settle(transfer, transfer.producer_lost(error))
        if not self._transfers and SlabIdle() not in actions:
            actions.append(SlabIdle())
        return tuple(action for action in actions if not isinstance(action, Send))

    def receive(self, message: PrefillMessage) -> tuple[DecodeAction, ...]:
        """Take one message of the peer.

        Raises: `RemoteProtocolError` or `NegotiationError` when the session cannot go on; nothing changed.
        """
        if self._state is SessionState.CLOSED:
            self._unknown += 1
            return ()
        self._strays.require_few()
        if isinstance(message, Welcome):
            return self._welcomed(message)
        if self._state not in WELCOMED:
            raise RemoteProtocolError(
                "Welcome comes first", state=self._state.value, event=type(message).__name__
            )
        if isinstance(message, GoAway):
            return self._sent_away(message)
        return self._answered() if isinstance(message, Pong) else self._dispatch(message)

    def ping(self) -> tuple[DecodeAction, ...]:
        """Ask the peer for a sign of life; nothing happens before Welcome and after our last word."""
        if self._state not in (SessionState.OPEN, SessionState.LEAVING):
            return ()
        self._pings += 1
        return (Send(Ping(self._pings)),)

    def leave(self, cause: str) -> tuple[DecodeAction, ...]:
        """Start nothing more: the peer shuts down, as it said by GoAway or of a prompt; only once.

        Whatever it said, we end the session: else a peer that says no more would keep it, and take nothing.
        """
        if self._state is not SessionState.OPEN:
            return ()
        self._step(SessionEvent.GO_AWAY)
        left = SessionLeaving(PeerLost(f"the prefill service ends the session: {cause}"))
        return (left, *self._leave())

    def _welcomed(self, message: Welcome) -> tuple[DecodeAction, ...]:
        if self._state is not SessionState.GREETING:
            raise RemoteProtocolError("one Welcome per session", state=self._state.value, event="Welcome")
        verify_welcome(self._hello, message, self._nonce)
        self._step(SessionEvent.WELCOME)
        self._welcome = message
        return (SessionOpened(),)

    def _answered(self) -> tuple[DecodeAction, ...]:
        self._pongs += 1
        self._strays.note(self._pongs > self._pings)
        return ()

    def _sent_away(self, message: GoAway) -> tuple[DecodeAction, ...]:
        if self._state is not SessionState.OPEN:
            self._unknown += 1
            self._strays.note()
        return self.leave(message.cause)

    def _leave(self) -> tuple[DecodeAction, ...]:
        """Say the last word once the peer has said of every transfer that it writes no more."""
        if self._state is not SessionState.LEAVING:
            return ()
        if not all(transfer.producer.has_ended for transfer in self._transfers.values()):
            return ()
        self._step(SessionEvent.LAST_ENDED)
        return (HalfClose(),)

    def _dispatch(
        self, message: PrefillAccepted | SpanSealed | PrefillDone | PrefillFailed | PrefillCancelled
    ) -> tuple[DecodeAction, ...]:
        key = message.span if isinstance(message, SpanSealed) else message
        transfer = self._transfers.get(key.transfer_id)
        if transfer is None:
            self._unknown += 1
            self._strays.note()
            return ()
        if transfer.attempt != key.attempt:
            stale = StaleGeneration("attempt", transfer.attempt, key.attempt)
            return self._settle(transfer, transfer.refuse(stale))
        match message:
            case SpanSealed(span):
                actions = transfer.span(span)
            case PrefillDone():
                actions = transfer.done(message)
            case PrefillAccepted():
                actions = transfer.accepted()
            case PrefillFailed():
                actions = transfer.failed(message.reason, message.message)
            case PrefillCancelled():
                actions = transfer.cancelled()
        return self._settle(transfer, actions)

    def _settle(
        self, transfer: DecodeTransfer, actions: tuple[DecodeAction, ...]
    ) -> tuple[DecodeAction, ...]:
        """Drop a transfer that has drained; then a session may leave, or its slab be idle."""
        if not any(isinstance(action, TransferDrained) for action in actions):
            return (*actions, *self._leave())
        del self._transfers[transfer.transfer_id]
        ended = transfer.statistics()
        self._late += ended.late_events
        self._duplicates += ended.duplicates
        idle = self._state is SessionState.CLOSED and not self._transfers
        return (*actions, SlabIdle()) if idle else (*actions, *self._leave())

    def _step(self, event: SessionEvent) -> None:
        following = SESSION_TRANSITIONS.get((self._state, event))
        if following is None:
            raise LocalProtocolError("illegal session event", state=self._state.value, event=event.value)
        self._state = following
