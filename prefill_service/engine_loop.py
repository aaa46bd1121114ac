"""Runs queued jobs one at a time on the engine's thread.

Theory of operation: the event loop takes the oldest job, asks its peer whether it is still wanted, runs it
on the one engine thread and hands the outcome back. The event loop never computes, the thread never touches
the session.

Ownership: one per service; owns the thread. `run` is cancelled to stop it: it then stops the running job and
ends only when the thread has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.errors import EngineFailed, InvariantViolation, KVSpanError
from common.kv.plan import SpanGranularity
from common.runtime.clock import Clock
from common.runtime.tasks import run_to_end
from common.telemetry.logging import log_fields
from prefill_service.decode_peer import DecodePeer
from prefill_service.engines.base import PrefillEngine
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
        self._job_left = asyncio.Event()
        # Invariant: set by all that may end `wait_idle`: a job that left queue or engine, the loop's end.
        queue.watch(self._job_left.set)
        self._has_ended = False

    @property
    def is_idle(self) -> bool:
        """Whether no job is queued or running."""
        return self._running is None and not len(self._queue)

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no job is queued or running, at most `limit_s` seconds, and tell whether it came true.

        It does not once the loop has ended.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not self.is_idle and not self._has_ended:
                    self._job_left.clear()
                    await self._job_left.wait()
        except TimeoutError:
            logger.warning("engine.still_busy", extra=log_fields(limit_s=limit_s, queued=len(self._queue)))
        return self.is_idle and not self._has_ended

    async def run(self, peer_of: Callable[[int], DecodePeer]) -> None:
        """Run jobs until cancelled; `peer_of` finds a peer by session number.

        Raises: `InvariantViolation` of the engine or the writer, which is no failure of one job.
        """
        try:
            while True:
                job = await self._queue.take()
                peer = peer_of(job.session_number)
                if peer.start(job):
                    await self._run_job(job, peer)
        finally:
            self._has_ended = True
            self._job_left.set()
            await asyncio.to_thread(self._thread.shutdown)

    async def _run_job(self, job: Job, peer: DecodePeer) -> None:
        """Run a job and tell its peer how it ended.

        When cancelled, it stops the engine and waits for its end first: only then may the slab go.
        """
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, run_to_end, run_job, job, self._engine, self._granularity, self._clock
        )
        self._running = job
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            job.give_up()
            await asyncio.wait([work])
            raise
        finally:
            self._running = None
            self._job_left.set()
            if work.done():
                peer.finish(job, _outcome(job, work))
        if isinstance(work.exception(), InvariantViolation):
            work.result()


def _outcome(job: Job, work: asyncio.Future[JobResult]) -> JobResult | KVSpanError:
    """Return what ended a job; whatever an engine raises is its failure."""
    error = work.exception()
    if error is None:
        return work.result()
    if isinstance(error, KVSpanError):
        return error
    fields = log_fields(transfer_id=job.target.start.transfer_id)
    logger.error("engine.failed", exc_info=error, extra=fields)
    return EngineFailed(f"{type(error).__name__}: {error}")
