"""The transfers of one session that have not drained, what each holds, and its copies.

Theory of operation: asks the session's machine about each event of a transfer and hands the machine's answer
to the session, which carries out what concerns the stream and gives back what concerns transfers (`act`). A
transfer holds slot and pages from `begin` until `TransferDrained`, however it ends (rule 4).

Ownership: one per session; owns the transfers. Event loop only; the importer calls back on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from common.engine.prefill import Logits
from common.errors import InvariantViolation, KVSpanError, RequestError
from common.kv.coverage import Coverage
from common.kv.ranges import Range
from common.kv.spans import Span
from common.runtime.clock import Clock
from common.session.actions import (
    DecodeAction,
    ImportSpan,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.decode_side import DecodeSession
from common.session.messages import PrefillDone, PrefillMessage, StartPrefill, step_limit_s
from common.session.peer_times import PeerTimes
from common.session.transfer_states import TransferState
from common.slab.allocator import Slot
from common.telemetry.logging import log_fields
from common.telemetry.timeline import SpanRecord, Timeline
from decode_service.cache.reservation import Holder, Reservation
from decode_service.prefill.importer import Importer, ImportJob
from decode_service.prefill.journaling import SessionJournal
from decode_service.prefill.remote_prefill import HeldTransfer, RemotePrefill
from decode_service.prefill.session_slots import SessionSlots
from decode_service.request import Request

logger = logging.getLogger(__name__)

MIN_TIME_LIMIT_S = 0.001
"""A request whose time is over is about to be cancelled anyway."""

DRAIN_LIMIT_S = 10.0
"""Seconds from a transfer's failure to the producer's word that it writes no more, of an engine that looks
for a stop at every layer; one that cannot has as much more time as it says."""

TransferAction = ImportSpan | TransferComplete | TransferFailed | TransferDrained
CarryOut = Callable[[Iterable[DecodeAction]], None]


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What the transfers of a session work with."""

    machine: DecodeSession
    slots: SessionSlots
    journal: SessionJournal
    importer: Importer
    clock: Clock


class SessionTransfers:
    """Transfers by id (`remote_prefill.TransferKeeper`)."""

    def __init__(self, parts: SessionParts, carry_out: CarryOut) -> None:
        """Start with none; `carry_out` takes what the machine decides."""
        self._machine = parts.machine
        self._slots = parts.slots
        self._journal = parts.journal
        self._importer = parts.importer
        self._clock = parts.clock
        self._carry_out = carry_out
        self._held: dict[int, HeldTransfer] = {}
        # Invariant: keys are the transfers that the machine counts as not drained.
        self._next_transfer_id = 1
        # Invariant: above every id used in this session; an id is never used twice, also after its drain.
        self._num_clock_errors = 0

    @property
    def num_clock_errors(self) -> int:
        """Complete transfers whose producer told times that cannot be true."""
        return self._num_clock_errors

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens of the transfers that are not drained."""
        return sum(held.prompt_len for held in self._held.values())

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when the machine counts other transfers."""
        if self._machine.num_transfers != len(self._held):
            statistics = self._machine.statistics()
            raise InvariantViolation(f"{len(self._held)} transfers held, machine: {statistics}")

    def overdue(self) -> list[int]:
        """Return the transfers that failed or were given up long ago and have not drained."""
        welcome = self._machine.welcome
        step_s = step_limit_s(welcome.longest_step_ms) if welcome else 0.0
        before_ns = self._clock.now_ns() - round((DRAIN_LIMIT_S + step_s) * 1e9)
        return [
            transfer_id
            for transfer_id, held in self._held.items()
            if held.failed_ns is not None and held.failed_ns < before_ns
        ]

    def begin(
        self, request: Request, reservation: Reservation, slot: Slot, timeline: Timeline
    ) -> RemotePrefill:
        """Start a transfer into pages and slot that are held; both stay held until it has drained.

        Raises: `LocalProtocolError` when the session takes none; the slot is given back.
        """
        geometry = self._machine.geometry
        required = geometry.required(0, request.prompt_len)
        start = self._start_message(request, slot, timeline, required)
        try:
            actions = self._machine.begin(start, Coverage(geometry.groups, required, slot.extent))
        except KVSpanError:
            self._slots.free(slot)
            raise
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_retrieve)
        held = HeldTransfer(
            start.transfer_id,
            request.request_id,
            slot,
            request.prompt_len,
            reservation,
            timeline,
            outcome,
            PeerTimes(self._clock.now_ns()),
        )
        # Held before StartPrefill is on its way: from then on the producer may write (rule 1).
        reservation.hold(Holder.PRODUCER)
        self._held[start.transfer_id] = held
        self._journal.transfer_started(start, reservation, required)
        fields = self._names(held) | {"tokens": request.prompt_len, "slot_bytes": slot.size}
        logger.info("transfer.started", extra=log_fields(**fields))
        self._carry_out(actions)
        return RemotePrefill(self, held)

    def abort(self, transfer_id: int, error: KVSpanError) -> None:
        """Give a transfer up; nothing happens when it has ended."""
        self._carry_out(self._machine.abort(transfer_id, error))

    def prove_complete(self, transfer_id: int) -> Logits:
        """Return the logits of a complete transfer; raises unless its state is COMPLETE."""
        held = self._held.get(transfer_id)
        if held is None:
            raise InvariantViolation(f"transfer {transfer_id} has drained and was never published")
        transfer = self._machine.transfer(transfer_id)
        if transfer.state is not TransferState.COMPLETE:
            raise InvariantViolation(f"transfer {transfer_id} is {transfer.state.value}, not complete")
        return np.frombuffer(transfer.producer.done.logits, dtype="<f4")

    def published(self, transfer_id: int) -> None:
        """Record the publication of a transfer's pages."""
        self._carry_out(self._machine.published(transfer_id))

    def received(self, message: PrefillMessage) -> None:
        """Note when a producer's end came, before the machine takes it."""
        if isinstance(message, PrefillDone) and (held := self._held.get(message.transfer_id)):
            held.times.done_received(message.timings, self._clock.now_ns())

    def act(self, action: TransferAction) -> None:
        """Carry out what the machine decided about one transfer."""
        match action:
            case ImportSpan(span):
                self._submit(span)
            case TransferComplete(transfer_id):
                self._complete(self._held[transfer_id])
            case TransferFailed(transfer_id, error):
                self._fail(transfer_id, error)
            case TransferDrained(transfer_id):
                self._drained(transfer_id)

    def _start_message(
        self, request: Request, slot: Slot, timeline: Timeline, required: tuple[Range, ...]
    ) -> StartPrefill:
        passed_s = (self._clock.now_ns() - timeline.arrived_ns) / 1e9
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
            first_tokens=tuple(tokens.start for tokens in required),
            mode=request.mode,
            time_limit_s=max(MIN_TIME_LIMIT_S, request.time_limit_s - passed_s),
            request_id=request.request_id,
        )

    def _complete(self, held: HeldTransfer) -> None:
        """Note when the engine worked, as far as that can be believed, and wake who waits."""
        timeline, problem = held.timeline, held.times.problem
        timeline.source_started_ns, timeline.source_ended_ns = held.times.engine_ns
        timeline.has_clock_error = bool(problem)
        self._num_clock_errors += bool(problem)
        if self._num_clock_errors == 1 and problem:
            # Once a session: a clock that is wrong is wrong for every transfer.
            logger.warning("clock.wrong", extra=log_fields(**self._names(held), times=problem))
        _settle(held.outcome, None)

    def _submit(self, span: Span) -> None:
        held = self._held[span.transfer_id]
        held.times.span_received(span, self._clock.now_ns())

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
        welcome = self._machine.welcome
        assert welcome is not None
        source = self._slots.view(span)
        self._importer.submit(ImportJob(span, source, table, welcome.digest, done, held.request_id))

    def _names(self, held: HeldTransfer) -> dict[str, object]:
        """Return what a line about a transfer is found by, in the logs of both services."""
        return {
            "request_id": held.request_id,
            "transfer_id": held.transfer_id,
            "slab": self._slots.name,
        }

    def _fail(self, transfer_id: int, error: KVSpanError) -> None:
        held = self._held[transfer_id]
        fields = log_fields(**self._names(held), reason=error.code, problem=str(error))
        if isinstance(error, RequestError):
            logger.info("transfer.cancelled", extra=fields)
        else:
            logger.warning("transfer.failed", extra=fields)
        held.error = error
        held.failed_ns = self._clock.now_ns()
        _settle(held.outcome, error)

    def _drained(self, transfer_id: int) -> None:
        held = self._held.pop(transfer_id)
        outcome = held.error.code if held.error is not None else "published"
        fields = log_fields(**self._names(held), outcome=outcome, spans=len(held.timeline.spans))
        logger.info("transfer.drained", extra=fields)
        # The one place where slab bytes and the producer's hold on pages come back (rule 4).
        self._slots.free(held.slot)
        held.reservation.drop(Holder.PRODUCER)


def _settle(outcome: asyncio.Future[None], error: KVSpanError | None) -> None:
    """Set the outcome unless the waiting call was cancelled first."""
    if not outcome.done():
        outcome.set_result(None) if error is None else outcome.set_exception(error)


def _retrieve(outcome: asyncio.Future[None]) -> None:
    """Mark an exception as seen, also when the call that waited is gone."""
    if not outcome.cancelled():
        outcome.exception()
