"""One prompt to compute: what the engine's thread needs, and the two reasons to stop it.

Ownership: made on the event loop by `DecodePeer`, run once on the engine's thread, ended on the event loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from common.kv.plan import SpanGranularity, plan_spans
from common.runtime.clock import Clock
from common.session.messages import GroupTotals, SourceTimings
from prefill_service.engines.base import PrefillEngine
from prefill_service.span_writer import SlotTarget, SpanWriter


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a finished job hands to PrefillDone."""

    totals: tuple[GroupTotals, ...]
    logits: bytes
    """float32 little endian."""

    timings: SourceTimings


@dataclass(slots=True)
class Job:
    """A queued or running prompt."""

    session_number: int
    target: SlotTarget
    accepted_ns: int
    stop: threading.Event = field(default_factory=threading.Event)
    """Set on the event loop, read on the engine's thread at every layer."""

    @property
    def key(self) -> tuple[int, int]:
        """(session number, transfer id)."""
        return (self.session_number, self.target.start.transfer_id)


def run_job(job: Job, engine: PrefillEngine, granularity: SpanGranularity, clock: Clock) -> JobResult:
    """Compute a prompt and write its KV; on the engine's thread.

    Raises: what the engine raises, `Cancelled` when `job.stop` was set. The slot's memory is let go of in
    every case: after this call no byte of the slot is written.
    """
    start = job.target.start
    started_ns = clock.now_ns()
    with job.target.memory:
        geometry = engine.describe().geometry
        plan = plan_spans(geometry, start.first_token, len(start.token_ids), granularity)
        writer = SpanWriter(geometry, plan, job.target, clock)
        logits = engine.prefill(start.token_ids, start.first_token, writer, job.stop.is_set)
        ended_ns = clock.now_ns()
        totals = writer.finish()
    timings = SourceTimings(job.accepted_ns, started_ns, ended_ns)
    return JobResult(totals, logits.astype("<f4", copy=False).tobytes(), timings)
