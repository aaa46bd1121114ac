"""Runs queued jobs one at a time on the engine's thread.

Theory of operation: the event loop takes the job whose turn it is, asks its owner whether it is still wanted,
runs it on the one engine thread and hands the outcome to the owner. The event loop never computes, the thread
never touches the session. A running job hears whether another session waits for the engine.

Ownership: one per service; owns the thread. `run` is cancelled to stop it: it then stops the running job and
ends only when the thread has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.engine.prefill import PrefillEngine
from common.errors import EngineFailed, InvariantViolation, KVSpanError, told
from common.kv.plan import SpanGranularity
from common.runtime.clock import Clock
from common.runtime.tasks import run_to_end
from common.telemetry.logging import log_fields
from prefill_service.job import Job, JobResult, run_job
from prefill_service.queue import JobQueue

logger = logging.getLogger(__name__)


class EngineLoop:
    """The consumer of the job queue."""

    def __init__(
        self, engine: PrefillEngine, granularity: SpanGranularity, queue: JobQueue[Job], clock: Clock
    ) -> None:
        self._engine = engine
        self._granularity = granularity
        self._queue = queue
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefill-engine")
        self._running: Job | None = None
        self._changed = asyncio.Event()
        # Invariant: set by all that anybody waits for: a job that came to the queue or left it, or left the
        # engine, and the loop's end.
        queue.watch(self._note_queue)
        self._has_ended = False

    @property
    def is_idle(self) -> bool:
        """Whether no job is queued or running."""
        return self._running is None and not len(self._queue)

    @property
    def running(self) -> Job | None:
        """The job that the engine has."""
        return self._running

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no job is queued or running, at most `limit_s` seconds, and tell whether it came true.

        It does not once the loop has ended.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not self.is_idle and not self._has_ended:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("engine.still_busy", extra=log_fields(limit_s=limit_s, queued=len(self._queue)))
        return self.is_idle and not self._has_ended

    async def run(self, on_idle: Callable[[], object] = lambda: None) -> None:
        """Run jobs until cancelled; call `on_idle` each time the last one has ended.

        Raises: `InvariantViolation` of the engine, the writer or `on_idle`, which is no failure of one job.
        """
        try:
            while True:
                job = await self._next_job()
                if job.owner.start(job):
                    await self._run_job(job)
                if self.is_idle:
                    on_idle()
        finally:
            self._has_ended = True
            self._changed.set()
            await asyncio.to_thread(self._thread.shutdown)

    async def _next_job(self) -> Job:
        """Wait for a job and take it; one may be gone again before whoever it woke has its turn."""
        while (job := self._queue.take()) is None:
            self._changed.clear()
            await self._changed.wait()
        return job

    async def _run_job(self, job: Job) -> None:
        """Run a job and tell its owner how it ended.

        When cancelled, it stops the engine and waits for its end first: only then may the slab go.
        """
        self._running = job
        self._note_queue()
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, run_to_end, run_job, job, self._engine, self._granularity, self._clock
        )
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            job.give_up()
            await asyncio.wait([work])
            raise
        finally:
            self._running = None
            self._changed.set()
            # Not done after a second cancel: the thread still writes, so the slot stays held.
            if work.done():
                job.owner.finish(job, _outcome(job, work))
        if isinstance(work.exception(), InvariantViolation):
            work.result()

    def _note_queue(self) -> None:
        """Wake who waits for a change, and tell the running job whether another session waits."""
        self._changed.set()
        if self._running is not None:
            self._running.contest(self._queue.others_wait(self._running.owner.number))


def _outcome(job: Job, work: asyncio.Future[JobResult]) -> JobResult | KVSpanError:
    """Return what ended a job; whatever an engine raises is its failure."""
    error = work.exception()
    if error is None:
        return work.result()
    if isinstance(error, KVSpanError) and not isinstance(error, EngineFailed):
        return error
    logger.error("engine.failed", exc_info=error, extra=log_fields(**job.names))
    return error if isinstance(error, EngineFailed) else EngineFailed(told(error))
