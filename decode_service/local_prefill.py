"""Computes prompts in the decode process, with the engine code of the prefill service (route local).

Theory of operation: one worker thread runs `ChunkedPrefill` with a `PageWriter` that puts rows straight into
the reserved pages: no slab, no session. The same publication follows, proven by what the writer placed.

Ownership: one per service; owns the thread. A reservation is held by `Holder.ENGINE` until the engine has
ended, also when the call that asked is gone (rule 4).
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import CoverageIncomplete, EngineFailed, InvariantViolation, KVSpanError
from common.kv.geometry import KVGeometry
from common.model.prefill import ChunkedPrefill
from common.runtime.clock import Clock
from common.runtime.invariants import raise_on
from common.runtime.tasks import run_to_end
from common.telemetry.timeline import Timeline
from decode_service.cache.storage import PagedStorage
from decode_service.journaling import DecodeJournal
from decode_service.page_writer import PageWriter
from decode_service.request import GenerationRequest
from decode_service.reservation import Holder, Reservation
from decode_service.sampling import logits_from_array

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Computed:
    logits: NDArray[np.float32]
    started_ns: int
    ended_ns: int


class LocalPrefill:
    """One prompt computed here (`publication.FinishedPrefill`)."""

    def __init__(self, writer: PageWriter, timeline: Timeline, work: asyncio.Future[_Computed]) -> None:
        self._writer = writer
        self._timeline = timeline
        self._work = work
        self._stop = threading.Event()

    @property
    def stop(self) -> threading.Event:
        """Set to make the engine give up at its next layer."""
        return self._stop

    async def wait(self) -> None:
        """Wait until the engine has ended well; raises the error that ended it."""
        await asyncio.shield(self._work)

    def abort(self, error: KVSpanError) -> None:
        """Give the prompt up; the engine stops at its next layer."""
        self._stop.set()

    def prove_complete(self) -> Tensor:
        """See `FinishedPrefill`."""
        computed = self._work.result()
        missing = self._writer.missing()
        if missing:
            raise CoverageIncomplete(missing)
        self._timeline.source_started_ns = computed.started_ns
        self._timeline.source_ended_ns = computed.ended_ns
        return logits_from_array(computed.logits)

    def settle(self) -> None:
        """See `FinishedPrefill`; there is nothing to give back."""


class LocalEngine:
    """The worker thread and its engine."""

    def __init__(
        self,
        prefill: ChunkedPrefill,
        geometry: KVGeometry,
        storage: PagedStorage,
        clock: Clock,
        journal: DecodeJournal | None = None,
    ) -> None:
        self._journal = journal or DecodeJournal()
        self._prefill = prefill
        self._geometry = geometry
        self._storage = storage
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-prefill")
        self._live: dict[LocalPrefill, int] = {}
        # Invariant: prompts that the engine has not ended, and their tokens.

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt."""
        return self._prefill.max_prompt_tokens

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens queued or running."""
        return sum(self._live.values())

    def begin(self, request: GenerationRequest, reservation: Reservation, timeline: Timeline) -> LocalPrefill:
        """Queue a prompt for the engine; its pages stay held until the engine has ended."""
        tables = reservation.pages.tables
        required = self._geometry.required(0, request.prompt_len)
        writer = PageWriter(self._storage, self._geometry, tables, required)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Computed] = loop.create_future()
        local = LocalPrefill(writer, timeline, outcome)
        reservation.hold(Holder.ENGINE)
        self._journal.local_started(reservation, required)
        self._live[local] = request.prompt_len
        work = loop.run_in_executor(self._thread, run_to_end, self._compute, request, writer, local.stop)

        def ended(finished: asyncio.Future[_Computed]) -> None:
            self._live.pop(local, None)
            self._journal.local_ended(reservation, _outcome_of(finished), len(writer.missing()))
            reservation.drop(Holder.ENGINE)
            _transfer(finished, outcome)
            if isinstance(error := finished.exception(), InvariantViolation):
                raise_on(loop, error)

        work.add_done_callback(ended)
        return local

    async def close(self) -> None:
        """Stop what runs and end the thread."""
        for local in self._live:
            local.stop.set()
        await asyncio.to_thread(self._thread.shutdown)

    def _compute(self, request: GenerationRequest, writer: PageWriter, stop: threading.Event) -> _Computed:
        started_ns = self._clock.now_ns()
        logits = self._prefill.prefill(request.prompt_ids, 0, writer, stop.is_set)
        return _Computed(logits, started_ns, self._clock.now_ns())


def _outcome_of(finished: asyncio.Future[_Computed]) -> str:
    error = finished.exception()
    return "done" if error is None else type(error).__name__


def _transfer(finished: asyncio.Future[_Computed], outcome: asyncio.Future[_Computed]) -> None:
    """Pass result or error on; an error that is not ours becomes `EngineFailed`."""
    error = finished.exception()
    if outcome.done():
        return
    if error is None:
        outcome.set_result(finished.result())
    elif isinstance(error, KVSpanError):
        outcome.set_exception(error)
    else:
        failure = EngineFailed(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        outcome.set_exception(failure)
    outcome.exception()
