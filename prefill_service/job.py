"""One prompt to compute: what the engine's thread needs, and how the event loop reaches it meanwhile.

Ownership: made on the event loop by its owner, run once on the engine's thread, ended on the event loop.
The engine's thread sets `ring` before it seals the first span; `stop` and `contested` are set before the ring
is looked for, and the ring looks at both before it waits: so neither is missed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

from common.engine.prefill import PrefillEngine, wanted_of
from common.errors import KVSpanError
from common.kv.plan import SpanGranularity, SpanPlan, plan_spans
from common.kv.ring import ring_shares
from common.runtime.clock import Clock
from common.session.messages import GroupTotals, SourceTimings, TransferMode
from prefill_service.credit import CreditRing, CreditTerms
from prefill_service.span_writer import SlotTarget, SpanWriter
from prefill_service.transfer_log import Names, names_of


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a finished job hands to PrefillDone."""

    totals: tuple[GroupTotals, ...]
    logits: bytes
    """float32 little endian."""

    timings: SourceTimings


class JobOwner(Protocol):
    """The session that asked for a job and answers for it; on the event loop."""

    @property
    def number(self) -> int:
        """Names the session inside this process."""

    def start(self, job: Job) -> bool:
        """Tell whether a job taken from the queue still wants to run."""

    def finish(self, job: Job, outcome: JobResult | KVSpanError) -> None:
        """A started job has ended, well or badly, and writes no more."""


@dataclass(slots=True)
class Job:
    """A queued or running prompt."""

    owner: JobOwner
    target: SlotTarget
    accepted_ns: int
    credit_wait_s: float
    """Longest wait for room in a slot smaller than the prompt's KV, all waits together; see `CreditTerms`."""

    stop: threading.Event = field(default_factory=threading.Event)
    """Set on the event loop, read on the engine's thread at every layer."""

    contested: threading.Event = field(default_factory=threading.Event)
    """Set on the event loop while a job of another session waits for the engine; see `CreditTerms`."""

    started_ns: int = 0
    """Set on the engine's thread when it begins; 0 before."""

    ring: CreditRing | None = None
    """Set on the engine's thread when the slot does not hold the whole KV."""

    @property
    def key(self) -> tuple[int, int]:
        """(session number, transfer id)."""
        return (self.owner.number, self.target.start.transfer_id)

    @property
    def names(self) -> Names:
        """What a line of the log about it is found by."""
        return names_of(self.owner.number, self.target.start)

    @property
    def is_waiting(self) -> bool:
        """Whether it keeps the engine waiting for credit now."""
        return self.ring is not None and self.ring.is_waiting

    def give_up(self) -> None:
        """Make the engine end at its next layer, or at once when it waits for credit; on the event loop."""
        self.stop.set()
        self._wake()

    def contest(self, others_wait: bool) -> None:
        """Tell it whether somebody else waits for the engine; on the event loop."""
        if others_wait != self.contested.is_set():
            self.contested.set() if others_wait else self.contested.clear()
            self._wake()

    def return_credit(self, sequence: int) -> None:
        """Decode gave the bytes of a sealed span back; on the event loop."""
        if self.ring is not None:
            self.ring.release(sequence)

    def _wake(self) -> None:
        if self.ring is not None:
            self.ring.wake()


def run_job(job: Job, engine: PrefillEngine, granularity: SpanGranularity, clock: Clock) -> JobResult:
    """Compute a prompt and write its KV; on the engine's thread.

    Raises: what the engine raises, `Cancelled` when `job.stop` was set, `LeaseExpired` when decode gave no
    credit in time. The slot's memory is let go of in every case: after this call no byte of it is written.
    """
    start = job.target.start
    job.started_ns = clock.now_ns()
    with job.target.memory:
        geometry = job.target.geometry
        plan = plan_spans(geometry, start.required, granularity)
        job.ring = _make_ring(job, plan, clock)
        writer = SpanWriter(plan, job.target, clock, job.ring)
        wanted = wanted_of(geometry, start.required)
        logits = engine.prefill(list(start.token_ids), wanted, writer, job.stop.is_set)
        ended_ns = clock.now_ns()
        totals = writer.finish()
    timings = SourceTimings(job.accepted_ns, job.started_ns, ended_ns)
    return JobResult(totals, logits.astype("<f4", copy=False).tobytes(), timings)


def _make_ring(job: Job, plan: SpanPlan, clock: Clock) -> CreditRing | None:
    """Return what gives the spans their bytes; None when no byte is used twice.

    Raises: `SpanOutOfRange` when the slot is too small even for a ring.
    """
    start = job.target.start
    if start.mode is TransferMode.DEFERRED or plan.total_bytes <= len(job.target.memory):
        return None
    shares = ring_shares(plan, len(job.target.memory))
    return CreditRing(shares, CreditTerms(job.credit_wait_s, job.stop, clock, job.contested))
