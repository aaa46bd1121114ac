"""The life of one job: a transfer as the prefill service sees it.

Theory of operation: `JOB_TRANSITIONS` is the whole rule; an event it does not list for a state is illegal.

    QUEUED --engine_started--> RUNNING --engine_ended--> GONE (Done or Failed sent)
      | stop                      | stop
      v                           v
    GONE (verdict sent)        STOPPING --engine_ended--> GONE (verdict sent)

A job is stopped by a cancel (verdict PrefillCancelled), by its time limit (verdict PrefillFailed) or by the
end of its session (no verdict: nobody hears it). The first verdict stands (rule 6). A ReleaseSpan gives
credit once, and only for a span that was sealed: else the producer would write over bytes that decode reads
(rule 5).

Ownership: one object per job, owned by `PrefillSession`, used on the event loop only.
Not here: which jobs exist and what is sent (`prefill_side.py`), the work itself (`prefill_service/job.py`).
"""

from __future__ import annotations

import enum

from common.errors import LocalProtocolError
from common.kv.ranges import Range
from common.session.messages import PrefillCancelled, PrefillDone, PrefillFailed, StartPrefill


class JobState(enum.Enum):
    """Where a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    """Cancelled or out of time; the engine has not ended yet."""

    GONE = "gone"


class JobEvent(enum.Enum):
    """What can happen to a job."""

    ENGINE_STARTED = "engine_started"
    ENGINE_ENDED = "engine_ended"
    STOP = "stop"


_S, _E = JobState, JobEvent
JOB_TRANSITIONS: dict[tuple[JobState, JobEvent], JobState] = {
    (_S.QUEUED, _E.ENGINE_STARTED): _S.RUNNING,
    # No engine has touched the slot: nothing has to drain, and the verdict is sent at once.
    (_S.QUEUED, _E.STOP): _S.GONE,
    (_S.RUNNING, _E.STOP): _S.STOPPING,
    # A cancel and the time limit may cross; both are right, and the first verdict stands.
    (_S.STOPPING, _E.STOP): _S.STOPPING,
    # Only the end of the engine proves that it writes no more (rule 4); QUEUED has none that could end.
    (_S.RUNNING, _E.ENGINE_ENDED): _S.GONE,
    (_S.STOPPING, _E.ENGINE_ENDED): _S.GONE,
}


class PrefillJob:
    """State machine of one job; a method that raises has changed nothing."""

    def __init__(self, start: StartPrefill) -> None:
        self._start = start
        self._state = JobState.QUEUED
        self._verdict: PrefillCancelled | PrefillFailed | None = None
        # Invariant: set once, and never while QUEUED or RUNNING.
        self._sealed: set[int] = set()
        # Invariant: holds exactly the sequences that were sealed and not released.

    @property
    def start(self) -> StartPrefill:
        """What decode asked for."""
        return self._start

    @property
    def state(self) -> JobState:
        """Where the job is."""
        return self._state

    @property
    def slot(self) -> Range:
        """Bytes of the slab that the engine may write."""
        return Range(self._start.slot_offset, self._start.slot_offset + self._start.slot_size)

    @property
    def num_sealed(self) -> int:
        """Spans that are sealed and not released."""
        return len(self._sealed)

    @property
    def verdict(self) -> PrefillCancelled | PrefillFailed | None:
        """The terminal message of a job that was stopped; set once."""
        return self._verdict

    def engine_started(self) -> None:
        """The engine has taken the job from the queue."""
        self._step(JobEvent.ENGINE_STARTED)

    def seal(self, sequence: int) -> bool:
        """Record that a span is sealed; False when it must not be, because the job does not run."""
        # STOPPING: the engine is still at work and may finish a span that decode, which has given the
        # transfer up, would never release.
        if self._state is not JobState.RUNNING:
            return False
        self._sealed.add(sequence)
        return True

    def release(self, sequence: int) -> bool:
        """Record that decode has copied a span; False when that span was not sealed, or released before."""
        # Credit for what was never sealed, or twice, would hand out bytes that decode still reads (rule 5).
        if sequence not in self._sealed:
            return False
        self._sealed.remove(sequence)
        return True

    def stop(self, verdict: PrefillCancelled | PrefillFailed | None) -> None:
        """Give the job up; it is GONE at once when no engine has it."""
        self._step(JobEvent.STOP)
        self._verdict = self._verdict or verdict

    def engine_ended(
        self, outcome: PrefillDone | PrefillFailed
    ) -> PrefillDone | PrefillFailed | PrefillCancelled:
        """Record that the engine writes no more; return the one terminal message of the job."""
        self._step(JobEvent.ENGINE_ENDED)
        # Also over a Done: the engine may have finished before it saw the stop, and decode waits for no KV.
        return self._verdict or outcome

    def _step(self, event: JobEvent) -> None:
        following = JOB_TRANSITIONS.get((self._state, event))
        if following is None:
            raise LocalProtocolError("illegal job event", state=self._state.value, event=event.value)
        self._state = following
