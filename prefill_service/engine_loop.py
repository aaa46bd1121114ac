"""Runs queued jobs one at a time on the engine's thread.

Theory of operation: the event loop takes the oldest job, asks its peer whether it is still wanted, runs it
on the one engine thread and hands the outcome back. The event loop never computes, the thread never touches
the session.

Ownership: one per service; owns the thread. `run` is cancelled to stop it and returns only when the thread
is idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from common.errors import EngineFailed, InvariantViolation, KVSpanError
from common.kv.plan import SpanGranularity
from common.runtime.clock import Clock
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
        self._job_ended = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether no job is queued or running."""
        return self._running is None and not len(self._queue)

    async def wait_idle(self, limit_s: float) -> None:
        """Wait until no job is queued or running, at most `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                while not self.is_idle:
                    self._job_ended.clear()
                    await self._job_ended.wait()
        except TimeoutError:
            logger.warning("engine.still_busy", extra=log_fields(limit_s=limit_s, queued=len(self._queue)))

    async def run(self, peer_of: Callable[[int], DecodePeer]) -> None:
        """Run jobs until cancelled; `peer_of` finds a peer by session number."""
        try:
            while True:
                job = await self._queue.take()
                peer = peer_of(job.session_number)
                if peer.start(job):
                    peer.finish(job, await self._compute(job))
        finally:
            if self._running is not None:
                self._running.stop.set()
            await asyncio.to_thread(self._thread.shutdown)

    async def _compute(self, job: Job) -> JobResult | KVSpanError:
        self._running = job
        loop = asyncio.get_running_loop()
        work = partial(run_job, job, self._engine, self._granularity, self._clock)
        try:
            return await loop.run_in_executor(self._thread, work)
        except KVSpanError as error:
            return error
        except InvariantViolation:
            raise
        except Exception as error:  # whatever an engine raises fails this one job
            logger.exception("engine.failed", extra=log_fields(transfer_id=job.target.start.transfer_id))
            return EngineFailed(f"{type(error).__name__}: {error}")
        finally:
            self._running = None
            self._job_ended.set()
