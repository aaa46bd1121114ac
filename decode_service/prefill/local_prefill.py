"""Computes prompts in the decode process, with the engine code of the prefill service (route local).

Theory of operation: one worker thread runs the engine with a `PageWriter` that puts rows straight into
the reserved pages: no slab, no session. The same publication follows, proven by what the writer placed. A
prompt that is given up before the thread has begun it is taken back and ends at once; one that runs is
stopped at its next layer.

Ownership: one per service; owns the thread. A reservation is held by `Holder.ENGINE` until the engine has
ended or will never begin, also when the call that asked is gone (rule 4).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from common.engine.decode import KVStore
from common.engine.prefill import Logits, PrefillEngine, Wanted, wanted_of
from common.errors import (
    Cancelled,
    CoverageIncomplete,
    EngineFailed,
    InvariantViolation,
    KVSpanError,
    PromptTooLong,
    RequestError,
    told,
)
from common.kv.geometry import KVGeometry
from common.runtime.clock import Clock
from common.runtime.invariants import raise_on
from common.runtime.tasks import run_to_end
from common.runtime.tracebacks import drop_tracebacks
from common.session.messages import TransferMode
from common.telemetry.logging import log_fields
from common.telemetry.timeline import Timeline
from decode_service.cache.reservation import Holder, Reservation
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.page_writer import PageWriter
from decode_service.request import Request, Route

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Computed:
    logits: Logits
    started_ns: int
    ended_ns: int


@dataclass(slots=True)
class _Prompt:
    """What the engine was given and has not ended."""

    request: Request
    reservation: Reservation
    wanted: Wanted
    writer: PageWriter
    outcome: asyncio.Future[_Computed]
    stop: threading.Event = field(default_factory=threading.Event)
    """Set on the event loop, read on the engine's thread at every layer."""

    run: Future[_Computed] | None = None
    """The thread's; set from the moment it is queued until it has ended."""


class LocalPrefill:
    """One prompt computed here (`publication.FinishedPrefill`)."""

    def __init__(
        self,
        writer: PageWriter,
        timeline: Timeline,
        work: asyncio.Future[_Computed],
        give_up: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._timeline = timeline
        self._work = work
        self._give_up = give_up

    async def wait(self) -> None:
        """Wait until the engine has ended well; raises the error that ended it."""
        await asyncio.shield(self._work)

    def abort(self, error: KVSpanError) -> None:
        """Give the prompt up: a queued one ends at once, a running one at its next layer."""
        self._give_up()

    def prove_complete(self) -> Logits:
        """See `FinishedPrefill`."""
        computed = self._work.result()
        missing = self._writer.missing()
        if missing:
            raise CoverageIncomplete(missing)
        self._timeline.source_started_ns = computed.started_ns
        self._timeline.source_ended_ns = computed.ended_ns
        return computed.logits

    def settle(self) -> None:
        """See `FinishedPrefill`; there is nothing to give back."""


class LocalEngine:
    """The worker thread and its engine: this process as a place for prompts (`places.Place`)."""

    name = "local"
    route = Route.LOCAL

    def __init__(  # noqa: PLR0913 - engine, cache, and what every owner of threads is told
        self,
        engine: PrefillEngine,
        store: KVStore,
        geometry: KVGeometry,
        clock: Clock,
        journal: DecodeJournal | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread; `on_change` is called when a prompt has ended and the backlog is shorter."""
        self._journal = journal or DecodeJournal()
        self._on_change = on_change
        self._engine = engine
        self._description = engine.describe()
        self._produced = engine.identity().geometry.dtypes
        self._geometry = geometry
        self._store = store
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-prefill")
        self._numbers = itertools.count()
        self._live: dict[int, _Prompt] = {}
        # Invariant: prompts that the engine has not ended, by number; the queue of the thread holds no more
        # than numbers, so that nothing of a prompt that was taken back stays in it.

    @property
    def num_running(self) -> int:
        """Prompts queued or running."""
        return len(self._live)

    @property
    def backlog_tokens(self) -> int:
        """Tokens of these prompts."""
        return sum(prompt.request.prompt_len for prompt in self._live.values())

    def slot_bytes(self, prompt_len: int, mode: TransferMode) -> int:
        """See `Place`: rows go straight into the pages."""
        return 0

    def refusal(self, prompt_len: int, mode: TransferMode) -> PromptTooLong | None:
        """See `Place`: the longest prompt of the engine."""
        limit = self._description.max_prompt_tokens
        return PromptTooLong("prompt tokens", prompt_len, limit) if prompt_len > limit else None

    def can_take(self, slot_bytes: int) -> bool:
        """See `Place`: whoever has pages and a lane may queue here; the thread runs one at a time."""
        return True

    def begin(self, request: Request, reservation: Reservation, timeline: Timeline) -> LocalPrefill:
        """Queue a prompt for the engine; its pages stay held until the engine has ended or will not begin."""
        timeline.engine, timeline.numerics = self._description.name, self._description.numerics_text
        tables = reservation.pages.tables
        required = self._geometry.required(0, request.prompt_len)
        writer = PageWriter(self._store, self._geometry, tables, required, self._produced)
        outcome: asyncio.Future[_Computed] = asyncio.get_running_loop().create_future()
        reservation.hold(Holder.ENGINE)
        self._journal.local_started(reservation, required)
        number = next(self._numbers)
        prompt = self._live[number] = _Prompt(
            request, reservation, wanted_of(self._geometry, required), writer, outcome
        )
        prompt.run = self._thread.submit(run_to_end, self._compute, number)
        asyncio.wrap_future(prompt.run).add_done_callback(partial(self._ended, number))
        return LocalPrefill(writer, timeline, outcome, partial(self._give_up, number))

    async def close(self) -> None:
        """Take back what is queued, stop what runs and end the thread."""
        for number in tuple(self._live):
            self._give_up(number)
        await asyncio.to_thread(self._thread.shutdown)

    def _compute(self, number: int) -> _Computed:
        """Run a prompt; on the engine's thread."""
        prompt, started_ns = self._live[number], self._clock.now_ns()
        token_ids = list(prompt.request.prompt_ids)
        logits = self._engine.prefill(token_ids, prompt.wanted, prompt.writer, prompt.stop.is_set)
        return _Computed(logits, started_ns, self._clock.now_ns())

    def _give_up(self, number: int) -> None:
        """Stop a prompt; nothing happens when it has ended.

        The thread's future is cancelled, never the event loop's: that one would end under a running engine.
        """
        prompt = self._live.get(number)
        if prompt is not None:
            prompt.stop.set()
            assert prompt.run is not None
            prompt.run.cancel()

    def _ended(self, number: int, finished: asyncio.Future[_Computed]) -> None:
        """Let go of a prompt that the engine has ended or will not begin, and tell its call."""
        prompt, error = self._live.pop(number), _error_of(finished)
        prompt.run = None  # it holds its error, whose frames hold the prompt
        ending = "done" if error is None else type(error).__name__
        self._journal.local_ended(prompt.reservation, ending, len(prompt.writer.missing()))
        prompt.reservation.drop(Holder.ENGINE)
        self._on_change()
        if error is None:
            prompt.outcome.set_result(finished.result())
            return
        if not isinstance(error, RequestError):
            fields = log_fields(request_id=prompt.request.request_id)
            logger.error("engine.failed", exc_info=error, extra=fields)
        if isinstance(error, InvariantViolation):
            raise_on(asyncio.get_running_loop(), error)
        else:
            drop_tracebacks(error)
        prompt.outcome.set_exception(_as_ours(error))
        prompt.outcome.exception()


def _error_of(finished: asyncio.Future[_Computed]) -> BaseException | None:
    return Cancelled("given up before its turn") if finished.cancelled() else finished.exception()


def _as_ours(error: BaseException) -> KVSpanError:
    """Return an error as the call hears it; one that is not ours becomes `EngineFailed`."""
    if isinstance(error, KVSpanError):
        return error
    failure = EngineFailed(told(error))
    failure.__cause__ = error
    return failure
