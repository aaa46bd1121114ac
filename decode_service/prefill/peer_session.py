"""One life of a session with a prefill service: its stream and its machine, over slab and transfers.

Theory of operation: carries out what `DecodeSession` decides: what is to be sent goes out in order, what
concerns one transfer goes to `SessionTransfers`, the rest opens, leaves and ends the session. When the
producer is lost the whole slab is abandoned, and unmapped once the last local copy has ended (rule 4).

    PeerConnection --receive--> machine --actions--> outgoing messages, transfers, slots

Ownership: made by `PeerConnection`; owns machine, slots and transfers. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.errors import Difference, InvariantViolation, KVSpanError, PeerLost, PeerUnavailable
from common.kv.geometry import KVGeometry
from common.runtime.clock import Clock
from common.session.actions import (
    DecodeAction,
    HalfClose,
    ImportSpan,
    Send,
    SessionLeaving,
    SessionOpened,
    SlabIdle,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.decode_side import WELCOMED, DecodeSession, DecodeSessionStatistics, SessionState
from common.session.messages import DecodeMessage, Hello, PrefillMessage, Welcome
from common.slab.segment import SlabSegment
from common.telemetry.logging import log_fields
from decode_service.prefill.importer import Importer
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.session_slots import SessionSlots
from decode_service.prefill.session_transfers import SessionParts, SessionTransfers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What every session of the service shares."""

    importer: Importer
    on_change: Callable[[], None]
    """Called when a session opened, gave something back, takes no more transfers, or has closed."""

    clock: Clock

    journal: DecodeJournal = field(default_factory=DecodeJournal)


class PeerSession:
    """Adapter between one stream and the session machine."""

    def __init__(self, hello: Hello, slab: SlabSegment, context: SessionContext) -> None:
        self._context = context
        self._machine = DecodeSession(hello, slab.nonce)
        self._journal = context.journal.session(slab.name)
        self._slots = SessionSlots(slab, self._journal)
        parts = SessionParts(self._machine, self._slots, self._journal, context.importer, context.clock)
        self._transfers = SessionTransfers(parts, self._carry_out)
        self._is_leaving = False
        self._is_retired = False
        # Invariant: retired implies leaving.
        self._outgoing: asyncio.Queue[DecodeMessage | None] = asyncio.Queue()

    @property
    def slots(self) -> SessionSlots:
        """The slab and its leases."""
        return self._slots

    @property
    def transfers(self) -> SessionTransfers:
        """What was begun and has not drained."""
        return self._transfers

    @property
    def is_open(self) -> bool:
        """Whether the peer has welcomed us and the stream has not ended."""
        return self._machine.state in WELCOMED

    @property
    def is_leaving(self) -> bool:
        """Whether the peer takes no new transfer though the session is open."""
        return self._is_leaving

    @property
    def is_retired(self) -> bool:
        """Whether a transfer has not drained in time, so that this session only finishes its others."""
        return self._is_retired

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended."""
        return self._machine.state is SessionState.CLOSED

    @property
    def geometry(self) -> KVGeometry:
        """Of the KV that is handed over."""
        return self._machine.geometry

    @property
    def welcome(self) -> Welcome:
        """What the peer said of itself; only once open."""
        welcome = self._machine.welcome
        assert welcome is not None
        return welcome

    @property
    def noted(self) -> tuple[Difference, ...]:
        """What differs and may; nothing unless numerics are declared."""
        return self._machine.noted

    def statistics(self) -> DecodeSessionStatistics:
        """Return the counts of the session."""
        return self._machine.statistics()

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when machine, slots and transfers disagree."""
        self._machine.check_integrity()
        self._slots.check_integrity()
        self._transfers.check_integrity()

    def check_idle(self) -> None:
        """Raise `InvariantViolation` when a slot is leased that no transfer holds; for no live request."""
        leased, held = self._slots.num_leased, self._machine.num_transfers
        if leased != held:
            raise InvariantViolation(f"no request is live, {leased} slots are leased, {held} transfers held")

    def greet(self) -> None:
        """Send Hello."""
        self._carry_out(self._machine.greet())

    def receive(self, message: PrefillMessage) -> None:
        """Take one message of the stream; raises what the machine raises."""
        self._journal.received(message)
        self._transfers.received(message)
        self._carry_out(self._machine.receive(message))

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._carry_out(self._machine.ping())

    def check_drained(self) -> None:
        """Take no more transfers once one has not drained in time; end when there is nothing else to finish.

        Its slot and pages cannot be used again in this slab, but what its neighbours hold is theirs still.
        Raises: `PeerLost` when nothing is left but what does not drain: the slab has to be abandoned.
        """
        overdue = self._transfers.overdue()
        if overdue and not self._is_retired:
            self._is_retired = True
            self._leave()
        if self._is_retired and len(overdue) == self._machine.num_transfers:
            raise PeerLost("a transfer did not drain in time, and the others have ended")

    async def next_message(self) -> DecodeMessage | None:
        """Wait for the next message to send; None when there will be no other."""
        return await self._outgoing.get()

    def close(self, error: KVSpanError) -> None:
        """The stream has ended: fail what depends on it and abandon the slab.

        What has its producer's end needs the slab only: it is copied to its end and published as ever.
        """
        self._journal.closed()
        self._carry_out(self._machine.close(error))
        self._outgoing.put_nowait(None)
        self._context.on_change()

    def _carry_out(self, actions: Iterable[DecodeAction]) -> None:
        for action in actions:
            self._journal.acted(action)
            match action:
                case Send(message):
                    self._outgoing.put_nowait(message)  # type: ignore[arg-type]
                case ImportSpan() | TransferComplete() | TransferFailed() | TransferDrained():
                    self._transfers.act(action)
                    self._follow(action)
                case SessionOpened():
                    self._journal.opened(self.welcome, self._slots.data)
                    self._slots.shut_door()
                    self._context.on_change()
                case SessionLeaving(error):
                    fields = log_fields(peer_boot_id=self.welcome.boot_id, cause=error)
                    logger.info("session.leaving", extra=fields)
                    self._leave()
                case HalfClose():
                    self._outgoing.put_nowait(None)
                case SlabIdle():
                    self._slots.close()

    def _follow(self, action: DecodeAction) -> None:
        """Do what the end of a transfer means to the session."""
        match action:
            case TransferFailed(_, PeerUnavailable() as error):
                # A peer that shuts down may say so of one prompt before its GoAway is here, or without any.
                self._carry_out(self._machine.leave(str(error)))
            case TransferDrained():
                self._context.on_change()
            case _:
                pass

    def _leave(self) -> None:
        """Start nothing from now on; what runs goes on."""
        if not self._is_leaving:
            self._is_leaving = True
            self._context.on_change()
