"""The life of one transfer as the decode service sees it.

Theory of operation: `transfer_states.TRANSITIONS` says what may follow what. The first terminal event stands
(rule 6): a failure sets `error` once, and an accepted `PrefillDone` is an end, too. After it local copies are
all that is missing, so no word of the peer and not its loss change the outcome any more; else it would depend
on how far the copies happen to be. Only this side can still give the transfer up.

Bytes are a separate matter (rule 4): `is_drained` needs the producer's own end *and* the end of every local
copy, whatever the outcome.

Ownership: one object per transfer, owned by `DecodeSession`, used on the event loop only.
Not here: which transfers exist (`decode_side.py`), the checks of spans (`transfer_spans.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import (
    KVSpanError,
    LocalProtocolError,
    PrefillFailed,
    RemoteProtocolError,
    StaleGeneration,
    TransferError,
)
from common.kv.coverage import Coverage
from common.kv.spans import Span
from common.session.actions import (
    DecodeAction,
    ImportSpan,
    Send,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.messages import CancelPrefill, PrefillDone, ReleaseSpan, StartPrefill
from common.session.producer_end import ProducerEnd, remote_error, require_logits
from common.session.strays import FAULT_STRAYS, Strays
from common.session.transfer_spans import TransferSpans, require_generation
from common.session.transfer_states import BEYOND_PEER, OVER, TransferEvent, TransferState, following


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counts of one transfer."""

    state: TransferState
    spans_in_flight: int
    """Sealed and not yet copied."""

    duplicates: int
    late_events: int
    """Events that came after the outcome was decided, or of the peer after its end was accepted."""


class DecodeTransfer:
    """State machine of one transfer; every method returns the actions to carry out."""

    def __init__(
        self, start: StartPrefill, coverage: Coverage, vocab_size: int, strays: Strays | None = None
    ) -> None:
        """Hold pages and slot; `strays` are those of the session."""
        self._start = start
        self._strays = strays or Strays()
        self._spans = TransferSpans(start, coverage)
        self._producer = ProducerEnd()
        self._vocab_size = vocab_size
        self._state = TransferState.RESERVED
        self._error: KVSpanError | None = None
        # Invariant: set exactly in ABORTING and ENDED, by the event that led there; never set twice (rule 6).
        self._late_events = 0

    @property
    def transfer_id(self) -> int:
        """Name inside the session."""
        return self._start.transfer_id

    @property
    def attempt(self) -> int:
        """Which try of the request, from 1."""
        return self._start.attempt

    @property
    def state(self) -> TransferState:
        """Where the transfer is."""
        return self._state

    @property
    def error(self) -> KVSpanError | None:
        """The outcome when it is a failure; set once."""
        return self._error

    @property
    def producer(self) -> ProducerEnd:
        """What is known of the producer's end; logits and times once its Done was accepted."""
        return self._producer

    @property
    def is_drained(self) -> bool:
        """Whether no byte of this transfer can move any more (rule 4)."""
        return self._producer.has_ended and not self._spans.num_in_flight

    def statistics(self) -> TransferStatistics:
        """Return the counts now."""
        duplicates = self._spans.statistics().num_duplicates
        return TransferStatistics(self._state, self._spans.num_in_flight, duplicates, self._late_events)

    def start(self) -> tuple[DecodeAction, ...]:
        """Send StartPrefill; from here on the producer may write into the slot."""
        self._step(TransferEvent.START)
        self._producer.begin()
        return (Send(self._start),)

    def import_finished(self, sequence: int) -> tuple[DecodeAction, ...]:
        """Record that the copy of one span has ended and its digest matched."""
        self._spans.copy_ended(sequence)
        if self._state in OVER:
            # Not released: credit would let the producer write where nothing is read any more.
            return self._drain()
        self._spans.release(sequence)
        credit = Send(ReleaseSpan(self.transfer_id, self.attempt, sequence))
        # After its end nobody waits for bytes, and the stream may be gone.
        return self._complete() if self._producer.has_ended else (credit,)

    def import_failed(self, sequence: int, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Record that the copy of one span has ended badly; the transfer fails."""
        self._spans.copy_ended(sequence)
        if self._state in OVER:
            return self._drain()
        return self._fault(error) if isinstance(error, TransferError) else self.abort(error)

    def published(self) -> tuple[DecodeAction, ...]:
        """Record the publication; slot bytes are free, the pages stay with the sequence."""
        self._step(TransferEvent.PUBLISH)
        return (TransferDrained(self.transfer_id),)

    def abort(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Give the transfer up (cancel, deadline, local failure); only the first outcome stands."""
        if self._state in OVER:
            return self._count_late()
        self._step(TransferEvent.ABORT)
        self._error = error
        cancel = CancelPrefill(self.transfer_id, self.attempt, error.code)
        # A producer that has ended would count the cancel as unknown; one that is lost cannot hear it.
        sends = () if self._producer.has_ended else (Send(cancel),)
        return (*sends, TransferFailed(self.transfer_id, error), *self._drain())

    def refuse(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """The producer broke a rule: that fails the transfer, unless its end was accepted before."""
        return self._stray() if self._state in BEYOND_PEER else self._fault(error)

    def producer_lost(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Record that the peer is gone: its slab is abandoned, so its writes no longer matter."""
        self._producer.end()
        return self._drain() if self._state in BEYOND_PEER else self.abort(error)

    def accepted(self) -> tuple[DecodeAction, ...]:
        """The producer queued the transfer."""
        if self._state in BEYOND_PEER:
            return self._stray()
        try:
            self._step_remote(TransferEvent.ACCEPTED)
        except RemoteProtocolError as error:
            return self._fault(error)
        return ()

    def span(self, span: Span) -> tuple[DecodeAction, ...]:
        """The producer sealed a span: check every field, then have it imported."""
        if self._state in BEYOND_PEER:
            # It may have been sealed before the producer heard that the transfer is given up.
            crosses = not self._producer.has_ended and self._spans.take_late(span.sequence)
            return self._count_late() if crosses else self._stray()
        try:
            self._step_remote(TransferEvent.SPAN)
            must_copy = self._spans.place(span)
        except (TransferError, RemoteProtocolError) as error:
            return self._fault(error)
        self._strays.note(not must_copy)
        return (ImportSpan(span),) if must_copy else ()

    def done(self, message: PrefillDone) -> tuple[DecodeAction, ...]:
        """The producer sealed everything; once this is accepted nothing of it is needed any more.

        A Done of another generation fails the transfer and is no proof that this one drained.
        """
        try:
            require_generation(self._start, message.generation)
        except StaleGeneration as error:
            return self.refuse(error)
        if self._state in BEYOND_PEER and self._producer.has_ended:
            return self._stray()
        # Before any check that may fail: whatever is wrong with what it says, it writes no more.
        self._producer.end()
        if self._state in BEYOND_PEER:
            return (*self._count_late(), *self._drain())
        try:
            self._step_remote(TransferEvent.DONE)
            self._spans.require_all(message.totals)
            require_logits(message.logits, self._vocab_size)
        except (TransferError, RemoteProtocolError) as error:
            return self._fault(error)
        self._producer.accept(message)
        return self._complete()

    def failed(self, reason: str, text: str) -> tuple[DecodeAction, ...]:
        """The producer failed and has drained."""
        return self._ended_badly(remote_error(reason, text))

    def cancelled(self) -> tuple[DecodeAction, ...]:
        """The producer stopped and has drained; without our asking that is a failure."""
        return self._ended_badly(
            PrefillFailed("PREFILL_CANCELLED", "the prefill service gave the transfer up")
        )

    def _ended_badly(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Take a terminal message; a second one is late."""
        if self._state in BEYOND_PEER and self._producer.has_ended:
            return self._stray()
        return self.producer_lost(error)

    def _step(self, event: TransferEvent) -> None:
        self._state = following(self._state, event)

    def _step_remote(self, event: TransferEvent) -> None:
        try:
            self._step(event)
        except LocalProtocolError as error:
            raise RemoteProtocolError(error.rule, state=error.state, event=error.event) from error

    def _complete(self) -> tuple[DecodeAction, ...]:
        # Both witnesses, in either order: the last copy may end before Done comes, or after it.
        if self._state is not TransferState.ENDING or self._spans.num_in_flight:
            return ()
        self._step(TransferEvent.IMPORTED)
        return (TransferComplete(self.transfer_id),)

    def _drain(self) -> tuple[DecodeAction, ...]:
        if self._state is not TransferState.ABORTING or not self.is_drained:
            return ()
        self._step(TransferEvent.DRAINED)
        return (TransferDrained(self.transfer_id),)

    def _fault(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Give the transfer up for what the producer did."""
        self._strays.note(FAULT_STRAYS)
        return self.abort(error)

    def _stray(self) -> tuple[DecodeAction, ...]:
        """Count what no honest producer says after this transfer was decided."""
        self._strays.note()
        return self._count_late()

    def _count_late(self) -> tuple[DecodeAction, ...]:
        self._late_events += 1
        return ()
