"""The prefill service's half of a session with one decode service.

Theory of operation: `prefill_states.py` rules the session, `prefill_job.py` each job.

A message the session does not allow at all (anything before Hello, a second Hello) raises
`RemoteProtocolError` and the adapter ends the stream; what is wrong with one job harms that job alone, until
there is too much of it (`strays.py`). A leave before OPEN has nobody to hear it and is kept until the session
opens.
A terminal message is sent only when the engine writes no more: it is the proof of drain that decode waits
for (rule 4). Spans sealed after a cancel are dropped. When the session closes, queued jobs vanish, running
ones are stopped, and the slab is unmapped only after the last of them has ended.

Ownership: one object per stream, used on the event loop only.
Not here: the queue over all sessions (`prefill_service/queue.py`), gRPC, memory, threads.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import pairwise

from common.errors import (
    InvariantViolation,
    KVSpanError,
    LocalProtocolError,
    RemoteProtocolError,
    ShuttingDown,
)
from common.kv.geometry import KVGeometry
from common.kv.ranges import Range
from common.kv.spans import Span
from common.session.actions import (
    AttachSlab,
    Dequeue,
    Enqueue,
    PrefillAction,
    ReturnCredit,
    Send,
    SlabIdle,
    StopEngine,
)
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    GoAway,
    GroupTotals,
    Hello,
    Ping,
    Pong,
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ReleaseSpan,
    SourceTimings,
    SpanSealed,
    StartPrefill,
    Welcome,
)
from common.session.negotiation import Agreement, PrefillOffer, negotiate
from common.session.prefill_job import JobState, PrefillJob
from common.session.prefill_states import (
    PREFILL_SESSION_TRANSITIONS,
    WELCOMED,
    PrefillEvent,
    PrefillState,
)
from common.session.strays import TOKENS_PER_STRAY, Strays

SHUTTING_DOWN = "the prefill service is shutting down"
"""What decode is told when prefill leaves."""


@dataclass(slots=True)
class IgnoredCounts:
    """What had no effect, of one session or of several."""

    unknown_messages: int = 0
    """Named no live job: late or wrong."""

    repeated_starts: int = 0
    """Named a live job: any answer would be taken for the end of that job."""

    ignored_releases: int = 0
    """Named a span that was not sealed or was released before."""

    dropped_spans: int = 0
    """Written after a cancel and never sealed."""

    def __add__(self, other: IgnoredCounts) -> IgnoredCounts:
        return IgnoredCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class PrefillSessionStatistics:
    """Counts of one session."""

    state: PrefillState
    peer_boot_id: str
    """Of decode; empty before its Hello."""

    num_jobs: int
    """Accepted and not ended."""

    num_queued: int
    """Of those, the ones that no engine has."""

    sealed_spans: int
    """Spans of those jobs that are sealed and not released."""

    pinned_bytes: int
    """Slab bytes of those jobs."""

    ignored: IgnoredCounts


class PrefillSession:
    """State machine of one session; every method returns the actions to carry out."""

    def __init__(self, offer: PrefillOffer, data_start: int = 0) -> None:
        """Wait for Hello; `data_start` is the first byte of the slab that a slot may use."""
        self._offer = offer
        self._data_start = data_start
        self._state = PrefillState.WAITING
        self._hello: Hello | None = None
        self._agreement: Agreement | None = None
        self._jobs: dict[int, PrefillJob] = {}
        # Invariant: holds every job that is not GONE; slots of the jobs are disjoint and inside the slab.
        self._highest_id = 0
        # Invariant: every id ever started is at most this; ids ascend and are never used twice.
        self._has_to_leave = False
        # Invariant: on the way into OPEN it tells whether an end came while nobody was there to hear it.
        self._ignored = IgnoredCounts()
        self._strays = Strays()

    @property
    def state(self) -> PrefillState:
        """Where the session is."""
        return self._state

    @property
    def agreement(self) -> Agreement:
        """What was chosen; only once Hello was accepted."""
        assert self._agreement is not None
        return self._agreement

    @property
    def geometry(self) -> KVGeometry:
        """Of the KV that is handed over: that of decode, whose groups and windows are its own business."""
        assert self._hello is not None
        return self._hello.identity.geometry

    def statistics(self) -> PrefillSessionStatistics:
        """Return the counts now."""
        jobs = self._jobs.values()
        return PrefillSessionStatistics(
            self._state,
            self._hello.boot_id if self._hello else "",
            len(jobs),
            sum(job.state is JobState.QUEUED for job in jobs),
            sum(job.num_sealed for job in jobs),
            sum(len(job.slot) for job in jobs),
            replace(self._ignored),
        )

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when the table of jobs contradicts itself."""
        slots = sorted((job.slot.start, job.slot.stop) for job in self._jobs.values())
        for (_, stop), (following, _) in pairwise(slots):
            if stop > following:
                raise InvariantViolation(f"a slot ends at {stop}, the next begins at {following}")
        for transfer_id, job in self._jobs.items():
            if job.state is JobState.GONE or transfer_id > self._highest_id:
                raise InvariantViolation(f"job {transfer_id} is filed wrongly")
            if self._state is PrefillState.CLOSED and job.state is not JobState.STOPPING:
                raise InvariantViolation(f"job {transfer_id} is {job.state.value} in a closed session")

    def receive(self, message: DecodeMessage) -> tuple[PrefillAction, ...]:
        """Take one message of the peer.

        Raises: `NegotiationError` when Hello does not fit, `RemoteProtocolError` when the message breaks
        the rules of the session; nothing changed, and the adapter ends the stream with that error.
        """
        if self._state is PrefillState.CLOSED:
            self._ignored.unknown_messages += 1
            return ()
        self._strays.require_few()
        if isinstance(message, Hello):
            return self._greeted(message)
        if self._state not in WELCOMED:
            raise RemoteProtocolError(
                "Hello comes first", state=self._state.value, event=type(message).__name__
            )
        match message:
            case StartPrefill():
                return self._started(message)
            case CancelPrefill():
                return self._cancelled(message)
            case ReleaseSpan():
                return self._span_released(message)
            case Ping(number):
                return (Send(Pong(number)),)

    def attached(self, nonce: bytes) -> tuple[PrefillAction, ...]:
        """The slab is mapped and its nonce was read: answer Welcome."""
        self._step(PrefillEvent.ATTACHED)
        welcome = Send(self._welcome(nonce))
        return (welcome, *self.leave()) if self._has_to_leave else (welcome,)

    def engine_started(self, transfer_id: int) -> bool:
        """Tell whether the job still wants to run; it is RUNNING afterwards."""
        job = self._jobs.get(transfer_id)
        if job is None:
            return False
        job.engine_started()
        return True

    def span_written(self, span: Span) -> tuple[PrefillAction, ...]:
        """The engine finished a span; seal it unless the job was cancelled."""
        job = self._jobs.get(span.transfer_id)
        if job is None or not job.seal(span.sequence):
            self._ignored.dropped_spans += 1
            return ()
        self._strays.allow()  # its release may cross the end of the job
        return (Send(SpanSealed(span)),)

    def engine_finished(
        self, transfer_id: int, totals: tuple[GroupTotals, ...], logits: bytes, timings: SourceTimings
    ) -> tuple[PrefillAction, ...]:
        """The engine ended well and wrote its last byte."""
        job = self._jobs[transfer_id]
        done = PrefillDone(transfer_id, job.start.attempt, job.start.generation, totals, logits, timings)
        return self._end(job, done)

    def engine_failed(self, transfer_id: int, error: KVSpanError) -> tuple[PrefillAction, ...]:
        """The engine ended badly and writes no more."""
        job = self._jobs[transfer_id]
        failed = PrefillFailed(job.start.transfer_id, job.start.attempt, error.code, str(error))
        return self._end(job, failed)

    def expire(self, transfer_id: int, error: KVSpanError) -> tuple[PrefillAction, ...]:
        """The time limit of a job has passed; nothing happens when it has ended already."""
        job = self._jobs.get(transfer_id)
        if job is None or self._state is PrefillState.CLOSED:
            return ()
        return self._stop(job, PrefillFailed(transfer_id, job.start.attempt, error.code, str(error)))

    def leave(self) -> tuple[PrefillAction, ...]:
        """Refuse every job that is started from now on; those that live may end. Said once, when open."""
        if self._state is not PrefillState.OPEN:
            self._has_to_leave = True
            return ()
        self._step(PrefillEvent.LEAVE)
        return (Send(GoAway(SHUTTING_DOWN)),)

    def close(self) -> tuple[PrefillAction, ...]:
        """End the session: queued jobs vanish, running ones are stopped, then the slab is idle."""
        if self._state is PrefillState.CLOSED:
            return ()
        self._step(PrefillEvent.CLOSE)
        actions: list[PrefillAction] = []
        for transfer_id, job in list(self._jobs.items()):
            actions.append((Dequeue if job.state is JobState.QUEUED else StopEngine)(transfer_id))
            job.stop(None)
            if job.state is JobState.GONE:
                del self._jobs[transfer_id]
        if not self._jobs:
            actions.append(SlabIdle())
        return tuple(actions)

    def _greeted(self, hello: Hello) -> tuple[PrefillAction, ...]:
        if self._state is not PrefillState.WAITING:
            raise RemoteProtocolError("one Hello per session", state=self._state.value, event="Hello")
        self._agreement = negotiate(hello, self._offer)
        self._hello = hello
        self._step(PrefillEvent.HELLO)
        return (AttachSlab(hello.slab),)

    def _welcome(self, nonce: bytes) -> Welcome:
        offer, agreement = self._offer, self.agreement
        return Welcome(
            version=agreement.version,
            boot_id=offer.boot_id,
            identity=offer.identity,
            modes=agreement.modes,
            digest=agreement.digest,
            granularity=offer.granularity,
            max_prompt_tokens=offer.max_prompt_tokens,
            max_concurrency=offer.max_concurrency,
            engine=offer.engine,
            nonce=nonce,
            longest_step_ms=offer.longest_step_ms,
        )

    def _started(self, start: StartPrefill) -> tuple[PrefillAction, ...]:
        weight = 1 + len(start.token_ids) // TOKENS_PER_STRAY
        if start.transfer_id in self._jobs:
            self._ignored.repeated_starts += 1
            self._strays.note(weight)
            return ()
        reason, problem = "START_REFUSED", self._problem(start)
        if self._state is PrefillState.LEAVING:
            reason, problem = ShuttingDown.code, SHUTTING_DOWN
        self._highest_id = max(self._highest_id, start.transfer_id)
        if problem:
            # What crosses our GoAway is no fault of the peer.
            self._strays.note(weight if self._state is not PrefillState.LEAVING else 0)
            return (Send(PrefillFailed(start.transfer_id, start.attempt, reason, problem)),)
        self._strays.allow()  # a cancel may cross its end
        accepted = PrefillAccepted(start.transfer_id, start.attempt, len(self._jobs))
        self._jobs[start.transfer_id] = PrefillJob(start)
        return (Send(accepted), Enqueue(start))

    def _problem(self, start: StartPrefill) -> str:
        """Return what is wrong with a StartPrefill, naming field and both values; empty when nothing is."""
        assert self._hello is not None
        offer, slab_bytes = self._offer, self._hello.slab.size_bytes
        prompt_len, vocab_size = len(start.token_ids), offer.identity.geometry.vocab_size
        stop = start.slot_offset + start.slot_size
        if start.transfer_id <= self._highest_id:
            return f"transfer_id is {start.transfer_id}, ids ascend and {self._highest_id} was used"
        if len(self._jobs) >= offer.max_concurrency:
            return f"max_concurrency is {offer.max_concurrency}, {len(self._jobs)} transfers are live"
        if not 1 <= prompt_len <= offer.max_prompt_tokens:
            return f"token_ids has {prompt_len} tokens, allowed 1 to {offer.max_prompt_tokens}"
        if max(start.token_ids) >= vocab_size:
            return f"token_ids has {max(start.token_ids)}, the vocabulary ends at {vocab_size}"
        num_groups = len(self.geometry.groups)
        if len(start.first_tokens) != num_groups:
            return f"first_tokens has {len(start.first_tokens)} entries, the session {num_groups} groups"
        if max(start.first_tokens) > prompt_len:
            return f"first_tokens has {max(start.first_tokens)}, the prompt ends at {prompt_len}"
        if start.mode not in self.agreement.modes:
            return f"mode is {start.mode.value}, agreed {[mode.value for mode in self.agreement.modes]}"
        if stop > slab_bytes:
            return f"slot ends at byte {stop}, the slab at {slab_bytes}"
        return self._slot_problem(Range(start.slot_offset, stop))

    def _slot_problem(self, wanted: Range) -> str:
        for job in self._jobs.values():
            if job.slot.overlaps(wanted):
                return f"slot {wanted} overlaps {job.slot} of transfer {job.start.transfer_id}"
        if wanted.start < self._data_start:
            return f"slot begins at byte {wanted.start}, the data of the slab at {self._data_start}"
        return ""

    def _cancelled(self, message: CancelPrefill) -> tuple[PrefillAction, ...]:
        job = self._live(message)
        if job is None:
            return ()
        # Its time limit may have passed before; the second cancel of a job is wrong.
        self._strays.note(job.state is JobState.STOPPING)
        return self._stop(job, PrefillCancelled(message.transfer_id, message.attempt))

    def _stop(self, job: PrefillJob, verdict: PrefillCancelled | PrefillFailed) -> tuple[PrefillAction, ...]:
        transfer_id = job.start.transfer_id
        job.stop(verdict)
        if job.state is not JobState.GONE:
            return (StopEngine(transfer_id),)
        del self._jobs[transfer_id]
        return (Dequeue(transfer_id), Send(verdict))

    def _span_released(self, message: ReleaseSpan) -> tuple[PrefillAction, ...]:
        job = self._live(message)
        if job is None:
            return ()
        if not job.release(message.sequence):
            self._ignored.ignored_releases += 1
            self._strays.note()
            return ()
        return (ReturnCredit(message.transfer_id, message.sequence),)

    def _live(self, message: CancelPrefill | ReleaseSpan) -> PrefillJob | None:
        job = self._jobs.get(message.transfer_id)
        if job is None or job.start.attempt != message.attempt:
            self._ignored.unknown_messages += 1
            self._strays.note()
            return None
        return job

    def _end(self, job: PrefillJob, outcome: PrefillDone | PrefillFailed) -> tuple[PrefillAction, ...]:
        terminal = job.engine_ended(outcome)
        del self._jobs[job.start.transfer_id]
        if self._state is PrefillState.CLOSED:
            return () if self._jobs else (SlabIdle(),)
        return (Send(terminal),)

    def _step(self, event: PrefillEvent) -> None:
        following = PREFILL_SESSION_TRANSITIONS.get((self._state, event))
        if following is None:
            raise LocalProtocolError("illegal session event", state=self._state.value, event=event.value)
        self._state = following
