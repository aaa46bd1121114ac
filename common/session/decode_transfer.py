"""The life of one transfer as the decode service sees it.

Theory of operation: `TRANSITIONS` is the whole rule; an event it does not list for a state is illegal.

    RESERVED --start--> REQUESTED --accepted--> STREAMING --done--> ENDING --imported--> COMPLETE
        |                   |                     | span                |                   | publish
        +------ abort ------+---------------------+------ abort --------+--- abort ---> PUBLISHED
                                  v
                              ABORTING --drained--> ENDED

The first terminal event stands (rule 6): `outcome` is set once. Bytes are a separate matter (rule 4):
`is_drained` needs the producer's own end *and* the end of every local copy, whatever the outcome.

Ownership: one object per transfer, owned by `DecodeSession`, used on the event loop only.
Not here: which transfers exist (`decode_side.py`), the copy itself (`decode_service/prefill/importer.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from common.errors import (
    CoverageIncomplete,
    EngineFailed,
    KVSpanError,
    LeaseExpired,
    LocalProtocolError,
    LogitsInvalid,
    PeerUnavailable,
    PrefillEngineFailed,
    PrefillFailed,
    RemoteProtocolError,
    ShuttingDown,
    SpanOutOfRange,
    StaleGeneration,
    TotalsMismatch,
    TransferError,
)
from common.kv.coverage import Coverage, Placement
from common.kv.spans import Span
from common.session.actions import (
    DecodeAction,
    ImportSpan,
    Send,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.messages import (
    CancelPrefill,
    GroupTotals,
    PrefillDone,
    ReleaseSpan,
    SourceTimings,
    StartPrefill,
)


class TransferState(enum.Enum):
    """Where a transfer is."""

    RESERVED = "reserved"
    """Pages and slot are held; nothing was sent."""

    REQUESTED = "requested"
    STREAMING = "streaming"
    ENDING = "ending"
    """The producer is done; copies are still under way."""

    COMPLETE = "complete"
    """All bytes are in their pages and checked; not yet readable."""

    PUBLISHED = "published"
    ABORTING = "aborting"
    """Failed or given up; bytes may still move."""

    ENDED = "ended"


class TransferEvent(enum.Enum):
    """What can happen to a transfer."""

    START = "start"
    ACCEPTED = "accepted"
    SPAN = "span"
    DONE = "done"
    IMPORTED = "imported"
    PUBLISH = "publish"
    ABORT = "abort"
    DRAINED = "drained"


_S, _E = TransferState, TransferEvent
TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (_S.RESERVED, _E.START): _S.REQUESTED,
    (_S.REQUESTED, _E.ACCEPTED): _S.STREAMING,
    (_S.STREAMING, _E.SPAN): _S.STREAMING,
    (_S.STREAMING, _E.DONE): _S.ENDING,
    (_S.ENDING, _E.IMPORTED): _S.COMPLETE,
    (_S.COMPLETE, _E.PUBLISH): _S.PUBLISHED,
    (_S.RESERVED, _E.ABORT): _S.ABORTING,
    (_S.REQUESTED, _E.ABORT): _S.ABORTING,
    (_S.STREAMING, _E.ABORT): _S.ABORTING,
    (_S.ENDING, _E.ABORT): _S.ABORTING,
    (_S.COMPLETE, _E.ABORT): _S.ABORTING,
    (_S.ABORTING, _E.DRAINED): _S.ENDED,
}

TERMINAL = frozenset({_S.PUBLISHED, _S.ENDED})
OVER = TERMINAL | {_S.ABORTING}
"""States in which the outcome is decided and later events only count."""


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counts of one transfer."""

    state: TransferState
    spans_placed: int
    spans_in_flight: int
    """Told and not yet copied."""

    duplicates: int
    late_events: int
    """Events that came after the outcome was decided."""


class DecodeTransfer:
    """State machine of one transfer; every method returns the actions to carry out."""

    def __init__(self, start: StartPrefill, coverage: Coverage, vocab_size: int) -> None:
        self._start = start
        self._coverage = coverage
        self._vocab_size = vocab_size
        self._state = TransferState.RESERVED
        self._in_flight: set[int] = set()
        # Invariant: holds exactly the sequences handed out by ImportSpan whose copy has not ended.
        self._producer_ended = True
        # Invariant: False from sending StartPrefill until a terminal message or the loss of the peer.
        self._done: PrefillDone | None = None
        self._error: KVSpanError | None = None
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
    def is_drained(self) -> bool:
        """Whether no byte of this transfer can move any more (rule 4)."""
        return self._producer_ended and not self._in_flight

    @property
    def has_producer_ended(self) -> bool:
        """Whether the producer writes no more, so that nothing need be said to it."""
        return self._producer_ended

    @property
    def logits(self) -> bytes:
        """float32 logits of the last position; only after PrefillDone."""
        assert self._done is not None
        return self._done.logits

    @property
    def timings(self) -> SourceTimings:
        """The producer's timings; only after PrefillDone."""
        assert self._done is not None
        return self._done.timings

    def statistics(self) -> TransferStatistics:
        """Return the counts now."""
        placed = self._coverage.statistics()
        return TransferStatistics(
            self._state, placed.num_spans, len(self._in_flight), placed.num_duplicates, self._late_events
        )

    def start(self) -> tuple[DecodeAction, ...]:
        """Send StartPrefill; from here on the producer may write into the slot."""
        self._step(TransferEvent.START)
        self._producer_ended = False
        return (Send(self._start),)

    def import_finished(self, sequence: int) -> tuple[DecodeAction, ...]:
        """Record that the copy of one span has ended and its digest matched."""
        self._in_flight.remove(sequence)
        if self._state in OVER:
            return self._drain()
        self._coverage.release(sequence)
        release = () if self._producer_ended else (self._release(sequence),)
        return (*release, *self._complete())

    def import_failed(self, sequence: int, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Record that the copy of one span has ended badly; the transfer fails."""
        self._in_flight.remove(sequence)
        return self.abort(error) if self._state not in OVER else self._drain()

    def published(self) -> tuple[DecodeAction, ...]:
        """Record the publication; slot bytes are free, the pages stay with the sequence."""
        self._step(TransferEvent.PUBLISH)
        return (TransferDrained(self.transfer_id),)

    def abort(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Give the transfer up (cancel, deadline, local failure); only the first outcome stands."""
        if self._state in OVER:
            self._late_events += 1
            return ()
        self._step(TransferEvent.ABORT)
        self._error = error
        cancel = CancelPrefill(self.transfer_id, self.attempt, error.code)
        sends = () if self._producer_ended else (Send(cancel),)
        return (*sends, TransferFailed(self.transfer_id, error), *self._drain())

    def producer_lost(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Record that the peer is gone: its slab is abandoned, so its writes no longer matter."""
        self._producer_ended = True
        if self._state in OVER:
            return self._drain()
        return self.abort(error)

    def accepted(self) -> tuple[DecodeAction, ...]:
        """The producer queued the transfer."""
        if self._state in OVER:
            return self._count_late()
        try:
            self._step_remote(TransferEvent.ACCEPTED)
        except RemoteProtocolError as error:
            return self.abort(error)
        return ()

    def span(self, span: Span) -> tuple[DecodeAction, ...]:
        """The producer told a span: check every field, then have it imported."""
        if self._state in OVER:
            return self._count_late()
        try:
            self._step_remote(TransferEvent.SPAN)
            self._check_identity(span)
            placement = self._coverage.place(span)
        except (TransferError, RemoteProtocolError) as error:
            return self.abort(error)
        if placement is Placement.DUPLICATE:
            return ()
        self._in_flight.add(span.sequence)
        return (ImportSpan(span),)

    def done(self, message: PrefillDone) -> tuple[DecodeAction, ...]:
        """The producer told everything; publication may follow once all copies ended.

        A Done of another generation fails the transfer and is no proof that this one drained.
        """
        try:
            self._check_generation(message.generation)
        except StaleGeneration as error:
            return self.abort(error)
        self._producer_ended = True
        if self._state in OVER:
            return (*self._count_late(), *self._drain())
        try:
            self._step_remote(TransferEvent.DONE)
            self._check_done(message)
        except (TransferError, RemoteProtocolError) as error:
            return self.abort(error)
        self._done = message
        return self._complete()

    def failed(self, reason: str, text: str) -> tuple[DecodeAction, ...]:
        """The producer failed and has drained."""
        return self._ended_badly(_remote_error(reason, text))

    def cancelled(self) -> tuple[DecodeAction, ...]:
        """The producer stopped and has drained; without our asking that is a failure."""
        return self._ended_badly(
            PrefillFailed("PREFILL_CANCELLED", "the prefill service gave the transfer up")
        )

    def _ended_badly(self, error: KVSpanError) -> tuple[DecodeAction, ...]:
        """Take a terminal message; a second one is late."""
        if self._state in OVER and self._producer_ended:
            return self._count_late()
        return self.producer_lost(error)

    def _step(self, event: TransferEvent) -> None:
        following = TRANSITIONS.get((self._state, event))
        if following is None:
            raise LocalProtocolError("illegal transfer event", state=self._state.value, event=event.value)
        self._state = following

    def _step_remote(self, event: TransferEvent) -> None:
        try:
            self._step(event)
        except LocalProtocolError as error:
            raise RemoteProtocolError(error.rule, state=error.state, event=error.event) from error

    def _check_identity(self, span: Span) -> None:
        self._check_generation(span.generation)
        if span.slot_id != self._start.slot_id:
            raise SpanOutOfRange("slot_id", span.slot_id, self._start.slot_id)

    def _check_generation(self, generation: int) -> None:
        if generation != self._start.generation:
            raise StaleGeneration("generation", self._start.generation, generation)

    def _check_done(self, message: PrefillDone) -> None:
        self._check_totals(message.totals)
        if not self._coverage.is_complete:
            raise CoverageIncomplete(self._coverage.missing())
        self._check_logits(message.logits)

    def _check_totals(self, totals: tuple[GroupTotals, ...]) -> None:
        received = self._coverage.statistics().groups
        if [total.group_index for total in totals] != list(range(len(received))):
            raise TotalsMismatch("groups", len(totals), len(received))
        for total, group in zip(totals, received, strict=True):
            pairs = (
                ("num_spans", total.num_spans, group.num_spans),
                ("num_bytes", total.num_bytes, group.span_bytes),
                ("layer_tokens", total.layer_tokens, group.placed_cells),
            )
            for field, theirs, ours in pairs:
                if theirs != ours:
                    raise TotalsMismatch(f"group {total.group_index} {field}", theirs, ours)

    def _check_logits(self, logits: bytes) -> None:
        if len(logits) != 4 * self._vocab_size:
            raise LogitsInvalid(f"{len(logits)} bytes, expected {4 * self._vocab_size}")
        if not np.isfinite(np.frombuffer(logits, dtype="<f4")).all():
            raise LogitsInvalid("a value is not finite")

    def _complete(self) -> tuple[DecodeAction, ...]:
        if self._state is not TransferState.ENDING or self._in_flight:
            return ()
        self._step(TransferEvent.IMPORTED)
        return (TransferComplete(self.transfer_id),)

    def _drain(self) -> tuple[DecodeAction, ...]:
        if self._state is not TransferState.ABORTING or not self.is_drained:
            return ()
        self._step(TransferEvent.DRAINED)
        return (TransferDrained(self.transfer_id),)

    def _release(self, sequence: int) -> DecodeAction:
        return Send(ReleaseSpan(self.transfer_id, self.attempt, sequence))

    def _count_late(self) -> tuple[DecodeAction, ...]:
        self._late_events += 1
        return ()


def _remote_error(reason: str, text: str) -> KVSpanError:
    """Return what a producer's failure means here: what another producer may do better has its own class."""
    if reason == LeaseExpired.code:
        return LeaseExpired(text)
    if reason == ShuttingDown.code:
        return PeerUnavailable(text)
    if reason == EngineFailed.code:
        return PrefillEngineFailed(text)
    return PrefillFailed(reason, text)
