"""One life of a session with a prefill service: machine, slab, slots and the transfers in it.

Theory of operation: carries out what `DecodeSession` decides. A slot is released when its transfer has
drained and the session is open; when the producer is lost the whole slab is abandoned instead, and unmapped
once the last local copy has ended (rule 4).

Ownership: made by `PrefillPeer` per connection; owns the slab, its allocator and the transfers. Event loop
only; the importer calls back on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvariantViolation, KVSpanError, PeerLost, PeerUnavailable
from common.kv.coverage import Coverage
from common.kv.ranges import Range
from common.kv.spans import Span
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
from common.session.decode_side import WELCOMED, DecodeSession, DecodeSessionStatistics
from common.session.decode_transfer import TransferState
from common.session.messages import DecodeMessage, Hello, PrefillMessage, StartPrefill, Welcome
from common.slab.allocator import AllocatorStatistics, Slot, SlotAllocator
from common.slab.segment import SlabSegment
from common.telemetry.logging import log_fields
from common.telemetry.timeline import SpanRecord, Timeline
from decode_service.cache.reservation import Holder, Reservation
from decode_service.generate.sampling import logits_from_array
from decode_service.prefill.importer import Importer, ImportJob
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.remote_prefill import HeldTransfer, RemotePrefill
from decode_service.request import Request

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

MIN_TIME_LIMIT_S = 0.001
"""A request whose time is over is about to be cancelled anyway."""

FINISHED = frozenset({TransferState.ENDING, TransferState.COMPLETE})
"""States of a transfer that needs no more of its producer and is not published."""

DRAIN_LIMIT_S = 10.0
"""Seconds from a transfer's failure to the producer's word that it writes no more."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What every session of the service shares."""

    importer: Importer
    on_change: Callable[[], None]
    """Called when a session opened or gave something back."""

    on_closed: Callable[[PeerSession, KVSpanError], None]
    """Called when a session takes no more transfers: once when its peer leaves, once when it has closed."""

    clock: Clock

    journal: DecodeJournal = field(default_factory=DecodeJournal)


class PeerSession:
    """Adapter between one stream, the session machine, the slab and the importer."""

    def __init__(self, hello: Hello, slab: SlabSegment, context: SessionContext) -> None:
        self._hello = hello
        self._slab = slab
        self._context = context
        self._machine = DecodeSession(hello, slab.nonce)
        self._allocator = SlotAllocator(slab.data)
        self._journal = context.journal.session(slab.name)
        self._held: dict[int, HeldTransfer] = {}
        # Invariant: keys are the transfers that the machine counts as not drained.
        self._next_transfer_id = 1
        self._is_leaving = False
        self._has_drained = asyncio.Event()
        self._outgoing: asyncio.Queue[DecodeMessage | None] = asyncio.Queue()

    @property
    def is_open(self) -> bool:
        """Whether the peer has welcomed us and the stream has not ended."""
        return self._machine.state in WELCOMED

    @property
    def is_leaving(self) -> bool:
        """Whether the peer takes no new transfer though the session is open."""
        return self._is_leaving

    @property
    def is_unmapped(self) -> bool:
        """Whether nothing of the session is left: closed, drained and its slab unmapped."""
        return self._slab.is_closed

    @property
    def welcome(self) -> Welcome:
        """What the peer said of itself; only once open."""
        welcome = self._machine.welcome
        assert welcome is not None
        return welcome

    @property
    def slab_capacity(self) -> int:
        """Bytes of the largest slot that can ever be leased."""
        return self._allocator.capacity_bytes

    @property
    def num_leased(self) -> int:
        """Slots in use: of transfers that are not drained, and granted to such as have not begun."""
        return self._allocator.statistics().num_leased

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens of the transfers that are not drained."""
        return sum(held.prompt_len for held in self._held.values())

    def statistics(self) -> DecodeSessionStatistics:
        """Return the counts of the session."""
        return self._machine.statistics()

    def slab_statistics(self) -> AllocatorStatistics:
        """Return the use of the slab."""
        return self._allocator.statistics()

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when machine, slots and transfers disagree."""
        self._machine.check_integrity()
        self._allocator.check_integrity()
        if self._machine.statistics().num_transfers != len(self._held):
            raise InvariantViolation(f"{len(self._held)} transfers held, machine: {self.statistics()}")

    def unlink_slab(self) -> None:
        """Remove the name of the slab, if it is still there."""
        self._slab.unlink()

    def can_lease(self, size: int) -> bool:
        """Tell whether a transfer with a slot of `size` bytes may start now."""
        if not self.is_open or self._is_leaving:
            return False
        # Counts slots, not transfers: one that was granted and has not begun yet will be a transfer, too.
        has_room = self._allocator.statistics().num_leased < self.welcome.max_concurrency
        return has_room and self._allocator.can_lease(size)

    def lease(self, size: int) -> Slot:
        """Take a slot for a transfer that `begin` starts, or `give_back` returns."""
        slot = self._allocator.lease(size)
        self._journal.slot_leased(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Return a slot whose transfer was never begun."""
        self._journal.slot_freed(slot)
        self._allocator.release(slot)

    def greet(self) -> None:
        """Send Hello."""
        self._carry_out(self._machine.greet())

    def receive(self, message: PrefillMessage) -> None:
        """Take one message of the stream; raises what the machine raises."""
        self._journal.received(message)
        self._carry_out(self._machine.receive(message))

    def check_drained(self) -> None:
        """Raise `PeerLost` when a transfer that ended long ago has not drained: only a new slab is safe."""
        now_ns = self._context.clock.now_ns()
        for transfer_id, held in self._held.items():
            if held.failed_ns is not None and now_ns - held.failed_ns > DRAIN_LIMIT_S * 1e9:
                raise PeerLost(f"transfer {transfer_id} did not drain within {DRAIN_LIMIT_S:.0f} s")

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._carry_out(self._machine.ping())

    async def next_message(self) -> DecodeMessage | None:
        """Wait for the next message to send; None when there will be no other."""
        return await self._outgoing.get()

    async def wait_finished(self) -> None:
        """The peer has ended the stream in order: start nothing, and wait for what needs no more of it."""
        self._leave(PeerLost("the prefill service ends the session"))
        while any(self._machine.transfer(one).state in FINISHED for one in self._held):
            self._has_drained.clear()
            await self._has_drained.wait()

    def close(self, error: KVSpanError) -> None:
        """The stream has ended: fail what depends on it and abandon the slab."""
        self._journal.closed()
        self._carry_out(self._machine.close(error))
        self._outgoing.put_nowait(None)
        self._context.on_closed(self, error)

    def begin(
        self, request: Request, reservation: Reservation, slot: Slot, timeline: Timeline
    ) -> RemotePrefill:
        """Start a transfer into pages and slot that are held; both stay held until it has drained."""
        start = self._start_message(request, slot, timeline)
        geometry = self._hello.identity.geometry
        required = geometry.required(start.first_token, request.prompt_len)
        coverage = Coverage(geometry.groups, required, Range(slot.offset, slot.offset + slot.size))
        try:
            actions = self._machine.begin(start, coverage)
        except KVSpanError:
            self.give_back(slot)
            raise
        held = HeldTransfer(
            slot, request.prompt_len, reservation, timeline, asyncio.get_running_loop().create_future()
        )
        held.outcome.add_done_callback(_retrieve)
        reservation.hold(Holder.PRODUCER)
        self._held[start.transfer_id] = held
        self._journal.transfer_started(start, reservation, required)
        self._carry_out(actions)
        return RemotePrefill(self, start, held)

    def abort(self, transfer_id: int, error: KVSpanError) -> None:
        """Give a transfer up."""
        self._carry_out(self._machine.abort(transfer_id, error))

    def prove_complete(self, transfer_id: int) -> Tensor:
        """Return the logits of a complete transfer; raises unless its state is COMPLETE."""
        held = self._held.get(transfer_id)
        if held is None:
            raise InvariantViolation(f"transfer {transfer_id} has drained and was never published")
        transfer = self._machine.transfer(transfer_id)
        if transfer.state is not TransferState.COMPLETE:
            raise InvariantViolation(f"transfer {transfer_id} is {transfer.state.value}, not complete")
        held.timeline.source_started_ns = transfer.timings.started_ns
        held.timeline.source_ended_ns = transfer.timings.ended_ns
        return logits_from_array(np.frombuffer(transfer.logits, dtype="<f4"))

    def published(self, transfer_id: int) -> None:
        """Record the publication of a transfer's pages."""
        self._carry_out(self._machine.published(transfer_id))

    def _start_message(self, request: Request, slot: Slot, timeline: Timeline) -> StartPrefill:
        passed_s = (self._context.clock.now_ns() - timeline.arrived_ns) / 1e9
        transfer_id = self._next_transfer_id
        self._next_transfer_id += 1
        return StartPrefill(
            transfer_id=transfer_id,
            attempt=1,
            slot_id=slot.slot_id,
            generation=slot.generation,
            slot_offset=slot.offset,
            slot_size=slot.size,
            token_ids=request.prompt_ids,
            first_token=0,
            mode=request.mode,
            time_limit_s=max(MIN_TIME_LIMIT_S, request.time_limit_s - passed_s),
            request_id=request.request_id,
        )

    def _carry_out(self, actions: Iterable[DecodeAction]) -> None:
        for action in actions:
            self._journal.acted(action)
            match action:
                case Send(message):
                    self._outgoing.put_nowait(message)  # type: ignore[arg-type]
                case SessionOpened():
                    self._journal.opened(self.welcome, self._slab.data)
                    self._slab.unlink()
                    self._context.on_change()
                case ImportSpan(span):
                    self._submit(span)
                case TransferComplete(transfer_id):
                    _settle(self._held[transfer_id].outcome, None)
                case TransferFailed(transfer_id, error):
                    self._fail(transfer_id, error)
                case TransferDrained(transfer_id):
                    self._drained(transfer_id)
                case SessionLeaving() | HalfClose() | SlabIdle():
                    self._carry_out_end(action)

    def _carry_out_end(self, action: SessionLeaving | HalfClose | SlabIdle) -> None:
        match action:
            case SessionLeaving(error):
                self._leave(error)
            case HalfClose():
                self._outgoing.put_nowait(None)
            case SlabIdle():
                self._slab.close()

    def _submit(self, span: Span) -> None:
        held = self._held[span.transfer_id]

        def done(outcome: SpanRecord | KVSpanError) -> None:
            if isinstance(outcome, SpanRecord):
                self._journal.imported(span)
                if held.error is None:  # else the request may run again, with the same timeline
                    held.timeline.spans.append(outcome)
                self._carry_out(self._machine.import_finished(span.transfer_id, span.sequence))
            else:
                self._journal.refused(span, outcome.code)
                self._carry_out(self._machine.import_failed(span.transfer_id, span.sequence, outcome))

        table = held.reservation.pages.tables[span.group_index]
        source = self._slab.view(span.offset, span.length)
        self._context.importer.submit(ImportJob(span, source, table, self.welcome.digest, done))

    def _fail(self, transfer_id: int, error: KVSpanError) -> None:
        logger.warning("transfer.failed", extra=log_fields(transfer_id=transfer_id, error=error))
        held = self._held[transfer_id]
        held.error = error
        held.failed_ns = self._context.clock.now_ns()
        _settle(held.outcome, error)
        if isinstance(error, PeerUnavailable):
            self._leave(PeerLost(str(error)))

    def _leave(self, error: KVSpanError) -> None:
        """Start nothing from now on, and fail what waits for a slot."""
        if not self._is_leaving:
            self._is_leaving = True
            self._context.on_closed(self, error)

    def _drained(self, transfer_id: int) -> None:
        held = self._held.pop(transfer_id)
        self._journal.slot_freed(held.slot)
        self._allocator.release(held.slot)
        held.reservation.drop(Holder.PRODUCER)
        self._has_drained.set()
        self._context.on_change()


def _settle(outcome: asyncio.Future[None], error: KVSpanError | None) -> None:
    """Set the outcome unless the waiting call was cancelled first."""
    if not outcome.done():
        outcome.set_result(None) if error is None else outcome.set_exception(error)


def _retrieve(outcome: asyncio.Future[None]) -> None:
    """Mark an exception as seen, also when the call that waited is gone."""
    if not outcome.cancelled():
        outcome.exception()
