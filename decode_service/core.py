"""The path of one request through the service: admitted, prefilled, published, decoded, given back.

Theory of operation: `generate` is one coroutine per request and reads as its life. Whatever ends it (success,
error, cancel, deadline), leaving it drops the CLIENT hold, stops what still runs for it, and returns at
once; pages and slot follow when the other holders have let go (`reservation.py`).

Ownership: one per service, event loop only; owns nothing but the counts, and knows all owners.
Not here: messages of the contract (`servicer.py`), opening and closing (`app.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from common.errors import (
    Cancelled,
    Draining,
    InvariantViolation,
    KVSpanError,
    PeerUnavailable,
    PromptTooLong,
)
from common.kv.geometry import KVGeometry
from common.kv.plan import plan_spans
from common.model.text import Tokenizer
from common.runtime.clock import Clock
from common.telemetry.logging import log_fields
from common.telemetry.timeline import Timeline
from decode_service.admission import Admission, Grant, SlotSource, Ticket
from decode_service.generation import Generation, TokenEvent
from decode_service.journaling import DecodeJournal
from decode_service.local_prefill import LocalEngine
from decode_service.peer_session import PeerSession
from decode_service.prefill_client import PrefillPeer
from decode_service.publication import FinishedPrefill, publish
from decode_service.request import GenerationRequest, Route
from decode_service.reservation import Holder
from decode_service.sequence import Sequence
from decode_service.step_loop import StepLoop

logger = logging.getLogger(__name__)


class RunningPrefill(FinishedPrefill, Protocol):
    """A prompt that is being computed somewhere."""

    async def wait(self) -> None:
        """Wait until it is complete; raises the error that ended it."""

    def abort(self, error: KVSpanError) -> None:
        """Give it up; nothing happens when it has ended."""


@dataclass(slots=True)
class RequestCounts:
    """Requests since start. Invariant: submitted = finished + failed + cancelled + refused + live."""

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """Turned away before anything was held."""

    live: int = 0
    prompts_remote: int = 0
    prompts_local: int = 0


@dataclass(frozen=True, slots=True)
class Owners:
    """Everything a request passes through."""

    geometry: KVGeometry
    tokenizer: Tokenizer
    admission: Admission
    step_loop: StepLoop
    local: LocalEngine
    peers: tuple[PrefillPeer, ...]
    clock: Clock
    rng: Random
    """Seeds requests that bring no seed."""

    journal: DecodeJournal = field(default_factory=DecodeJournal)


class DecodeCore:
    """Runs requests."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._counts = RequestCounts()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        # Invariant: set exactly while no request is live.

    # ------------------------------------------------------------------- questions

    @property
    def counts(self) -> RequestCounts:
        """Requests since start."""
        return self._counts

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when an owner contradicts itself or the counts do not add up."""
        counts = self._counts
        ended = counts.finished + counts.failed + counts.cancelled + counts.refused
        if counts.submitted != ended + counts.live:
            raise InvariantViolation(f"request counts do not add up: {counts}")
        self._owners.admission.check_integrity()
        for peer in self._owners.peers:
            peer.check_integrity()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no request is live, at most `limit_s` seconds; tell whether that came true."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # ---------------------------------------------------------------------- a life

    async def generate(
        self, request: GenerationRequest, timeline: Timeline
    ) -> AsyncGenerator[list[TokenEvent]]:
        """Yield the tokens of a request as they come, at least one at a time.

        Raises: the error that ended it. Nothing stays held when this ends, but what cannot be taken back
        yet, which comes back on its own.
        """
        self._enter()
        outcome = "failed"
        try:
            async with aclosing(self._run(request, timeline)) as lists:
                async for events in lists:
                    yield events
            outcome = "finished"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except KVSpanError:
            outcome = "failed" if timeline.reserved_ns else "refused"
            raise
        finally:
            self._leave(request, outcome)

    async def _run(self, request: GenerationRequest, timeline: Timeline) -> AsyncGenerator[list[TokenEvent]]:
        """Admit, prefill, publish and decode one request."""
        if self._is_draining:
            raise Draining("the decode service is shutting down")
        session = self._session_for(request)
        grant = await self._admit(request, session)
        timeline.reserved_ns = self._owners.clock.now_ns()
        sequence: Sequence | None = None
        try:
            sequence = await self._prefill(request, session, grant, timeline)
            self._owners.step_loop.start(sequence)
            async with aclosing(self._decode(sequence, timeline)) as lists:
                async for events in lists:
                    yield events
        finally:
            if sequence is not None:
                sequence.is_cancelled = True
            grant.reservation.drop(Holder.CLIENT)

    async def _admit(self, request: GenerationRequest, session: PeerSession | None) -> Grant:
        """Wait for pages, lane and slot."""
        granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        ticket = self._ticket(request, session, granted)
        self._owners.admission.offer(ticket)
        try:
            return await granted
        except asyncio.CancelledError:
            self._owners.admission.withdraw(ticket)
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._refuse_grant(granted.result(), session)
            raise

    async def _prefill(
        self, request: GenerationRequest, session: PeerSession | None, grant: Grant, timeline: Timeline
    ) -> Sequence:
        """Compute the prompt where it was asked for, and publish it."""
        prefill = self._begin(request, session, grant, timeline)
        generation = Generation(request, self._owners.tokenizer, self._owners.rng)
        try:
            await prefill.wait()
            sequence = publish(
                grant.reservation,
                prefill,
                generation,
                request.prompt_len,
                self._owners.journal.reservation_published,
            )
        except BaseException as error:
            cause = error if isinstance(error, KVSpanError) else Cancelled(type(error).__name__)
            prefill.abort(cause)
            raise
        timeline.published_ns = self._owners.clock.now_ns()
        return sequence

    async def _decode(self, sequence: Sequence, timeline: Timeline) -> AsyncGenerator[list[TokenEvent]]:
        while True:
            events = await sequence.next_events()
            now_ns = self._owners.clock.now_ns()
            timeline.first_token_ns = timeline.first_token_ns or now_ns
            timeline.last_token_ns = now_ns
            yield events
            if events[-1].finish is not None:
                return

    # --------------------------------------------------------------------- private

    def _session_for(self, request: GenerationRequest) -> PeerSession | None:
        """Return the session that will compute the prompt; None for this process."""
        if request.route is Route.LOCAL:
            return None
        sessions = [peer.session for peer in self._owners.peers if peer.session is not None]
        if not sessions:
            problems = "; ".join(f"{peer.target}: {peer.problem}" for peer in self._owners.peers)
            raise PeerUnavailable(f"no prefill service is connected ({problems or 'none is configured'})")
        return min(sessions, key=lambda session: session.statistics().num_transfers)

    def _ticket(
        self, request: GenerationRequest, session: PeerSession | None, granted: asyncio.Future[Grant]
    ) -> Ticket:
        slots: SlotSource | None = session
        return Ticket(
            prompt_len=request.prompt_len,
            max_new_tokens=request.sampling.max_new_tokens,
            slots=slots,
            slot_bytes=self._slot_bytes(request, session),
            granted=lambda grant: self._deliver_grant(grant, session, granted),
            failed=lambda error: None if granted.done() else granted.set_exception(error),
        )

    def _slot_bytes(self, request: GenerationRequest, session: PeerSession | None) -> int:
        """Return the slab bytes the prompt needs; raises `PromptTooLong` when it can never fit."""
        limit = session.welcome.max_prompt_tokens if session else self._owners.local.max_prompt_tokens
        if request.prompt_len > limit:
            raise PromptTooLong("prompt tokens", request.prompt_len, limit)
        if session is None:
            return 0
        plan = plan_spans(self._owners.geometry, 0, request.prompt_len, session.welcome.granularity)
        if plan.total_bytes > session.slab_capacity:
            raise PromptTooLong("slab bytes", plan.total_bytes, session.slab_capacity)
        return plan.total_bytes

    def _begin(
        self, request: GenerationRequest, session: PeerSession | None, grant: Grant, timeline: Timeline
    ) -> RunningPrefill:
        if session is None:
            self._counts.prompts_local += 1
            return self._owners.local.begin(request, grant.reservation, timeline)
        assert grant.slot is not None
        if not session.is_open:
            session.give_back(grant.slot)
            raise PeerUnavailable("the session ended while the request waited")
        self._counts.prompts_remote += 1
        return session.begin(request, grant.reservation, grant.slot, timeline)

    def _deliver_grant(
        self, grant: Grant, session: PeerSession | None, granted: asyncio.Future[Grant]
    ) -> None:
        """Hand a grant to the call that waits, or give it back when that call has just been cancelled."""
        self._owners.journal.reservation_made(grant.reservation)
        if granted.done():
            self._refuse_grant(grant, session)
        else:
            granted.set_result(grant)

    def _refuse_grant(self, grant: Grant, session: PeerSession | None) -> None:
        """Give back what was granted to a call that is gone."""
        if session is not None and grant.slot is not None:
            session.give_back(grant.slot)
        grant.reservation.drop(Holder.CLIENT)

    def _enter(self) -> None:
        self._counts.submitted += 1
        self._counts.live += 1
        self._idle.clear()

    def _leave(self, request: GenerationRequest, outcome: str) -> None:
        counts = self._counts
        counts.live -= 1
        counts.finished += outcome == "finished"
        counts.failed += outcome == "failed"
        counts.cancelled += outcome == "cancelled"
        counts.refused += outcome == "refused"
        if not counts.live:
            self._idle.set()
        fields = log_fields(request_id=request.request_id, outcome=outcome, tokens=request.prompt_len)
        logger.info("request.ended", extra=fields)
