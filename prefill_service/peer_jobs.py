"""The jobs of one session that have not ended: their places in the queue, their time, and how they end.

Theory of operation: a job is added to the queue of all sessions with a timer of its own, and is let go of
once: withdrawn from the queue, or ended by the engine. How it held the engine decides whose turn comes when:
a session whose job waited for credit in vain goes last until a job of it is done.

Ownership: one per stream; owns the timers; event loop only.
Not here: which jobs may live and what their peer hears (`common/session/prefill_side.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common.errors import InvariantViolation, KVSpanError, LeaseExpired
from common.telemetry.logging import log_fields
from prefill_service.job import Job, JobResult
from prefill_service.queue import JobQueue

logger = logging.getLogger(__name__)

OnExpired = Callable[[int, LeaseExpired], None]


class PeerJobs:
    """Queued and running jobs, by transfer id."""

    def __init__(self, queue: JobQueue[Job], on_expired: OnExpired) -> None:
        """Have none; `on_expired` hears of each job whose time limit passes."""
        self._queue = queue
        self._on_expired = on_expired
        self._jobs: dict[int, Job] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        # Invariant: one timer for each job, and none besides.

    def add(self, job: Job) -> None:
        """Queue a job and let its time begin."""
        start = job.target.start
        self._jobs[start.transfer_id] = job
        timer = asyncio.get_running_loop().call_later(start.time_limit_s, self._expire, job)
        self._timers[start.transfer_id] = timer
        self._queue.put(job)

    def withdraw(self, transfer_id: int) -> None:
        """Take a job that has not started out of the queue and let go of its memory."""
        job = self._forget(transfer_id)
        self._queue.remove(job.key)
        job.target.memory.release()

    def of(self, transfer_id: int) -> Job:
        """Return the live job of a transfer."""
        return self._jobs[transfer_id]

    def ended(self, job: Job, outcome: JobResult | KVSpanError) -> None:
        """Let go of a job that the engine has ended, and decide whose turn comes when."""
        self._forget(job.target.start.transfer_id)
        self._say_waits(job)
        match outcome:
            case LeaseExpired():
                self._put_last(job)
            case JobResult() if self._queue.put_in_turn(job.owner.number):
                logger.info("session.put_in_turn", extra=log_fields(**job.names))
            case _:
                pass

    def check_integrity(self, num_jobs: int) -> None:
        """Raise `InvariantViolation` unless these are `num_jobs` jobs with a timer each and sound rings."""
        held = len(self._jobs), len(self._timers)
        if held != (num_jobs, num_jobs) or self._jobs.keys() != self._timers.keys():
            raise InvariantViolation(f"{num_jobs} jobs live, but (jobs, timers) are {held}")
        for job in self._jobs.values():
            if job.ring is not None:
                job.ring.check_integrity()

    def _expire(self, job: Job) -> None:
        start = job.target.start
        # A job that was queued or computed until its limit is no fault of its session: going last would make
        # the next one later still. One that waits for credit has kept the engine from others.
        if job.is_waiting:
            self._put_last(job)
        error = LeaseExpired(f"prefill did not end within {start.time_limit_s:g} s")
        self._on_expired(start.transfer_id, error)

    def _put_last(self, job: Job) -> None:
        """Let the other sessions go first until a job of this one is done."""
        if self._queue.put_last(job.owner.number):
            logger.warning("session.put_last", extra=log_fields(**job.names))

    def _say_waits(self, job: Job) -> None:
        """Log what a job waited for credit in all; a line for each wait would be one for each span."""
        if job.ring is None or not (counts := job.ring.statistics()).num_waits:
            return
        waits = {"waits": counts.num_waits, "waited_s": round(counts.waited_ns / 1e9, 3)}
        logger.info("credit.waited", extra=log_fields(**job.names, **waits))

    def _forget(self, transfer_id: int) -> Job:
        self._timers.pop(transfer_id).cancel()
        return self._jobs.pop(transfer_id)
