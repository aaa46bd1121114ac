"""The path of one request through the service: read, admitted, prefilled, published, decoded, given back.

Theory of operation: `generate` is one coroutine per request and reads as its life. Whatever ends it (success,
error, cancel, deadline), leaving it drops the CLIENT hold, stops what still runs for it, and returns at
once; pages and slot follow when the other holders have let go (`cache/reservation.py`).

Ownership: one per service, event loop only; owns nothing but the counts, and knows all owners.
Not here: messages of the contract (`api/servicer.py`), opening and closing (`app.py`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from random import Random

from common.errors import (
    Cancelled,
    InvariantViolation,
    KVSpanError,
    PeerLost,
    PeerUnavailable,
    PrefillEngineFailed,
    RequestError,
    ShuttingDown,
)
from common.model.text import Tokenizer
from common.runtime.clock import Clock
from common.telemetry.logging import log_fields
from common.telemetry.timeline import Timeline
from decode_service.cache.admission import Admission, Grant, SlotSource, Ticket
from decode_service.cache.reservation import Holder
from decode_service.generate.answer import Answer, TokenEvent
from decode_service.generate.sequence import Sequence
from decode_service.generate.step_loop import StepLoop
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.peer_session import PeerSession
from decode_service.prefill.routing import Router
from decode_service.publication import publish
from decode_service.request import Request, Route

logger = logging.getLogger(__name__)

Read = Callable[[], Awaitable[Request]]
"""Turns what a client sent into a request, or raises what is wrong with it."""

LATE_TOLERANCE_S = 0.05
"""A client's library ends its call at the same deadline, and its word may be here a moment before."""


class LossPolicy(enum.Enum):
    """What becomes of a request whose prefill service is lost before it was done with it."""

    FAIL = "fail"
    """UNAVAILABLE; the client may try again."""

    RETRY = "retry"
    """Run again in another session, also one that is opened meanwhile."""

    LOCAL = "local"
    """Run again in this process."""


LOSSES = (PeerLost, PeerUnavailable, PrefillEngineFailed)
"""Ends of an attempt after which another prefill service, or this process, may do better."""

MAX_ATTEMPTS = 3
"""Tries of one request, the first included."""

REOPEN_WAIT_S = 10.0
"""How long a lost request waits for an open session."""


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
    reading: int = 0
    """Of the live ones those that are still read: they hold nothing, and shutting down waits for them too."""

    prompts_remote: int = 0
    prompts_local: int = 0
    retried: int = 0
    """Attempts after the first, of requests whose prefill service was lost."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Everything a request passes through."""

    tokenizer: Tokenizer
    admission: Admission
    step_loop: StepLoop
    router: Router
    loss_policy: LossPolicy
    clock: Clock
    rng: Random
    """Seeds requests that bring no seed."""

    journal: DecodeJournal = field(default_factory=DecodeJournal)


class DecodeCore:
    """Runs requests."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._counts = RequestCounts()
        self._is_shutting_down = False
        self._idle = asyncio.Event()
        self._idle.set()
        # Invariant: set exactly while no request is live.

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
        for peer in self._owners.router.peers:
            peer.check_integrity()

    def _check_idle(self) -> None:
        """Check everything while nobody waits for it; raises in a callback of the loop."""
        if self._counts.live:
            return
        self.check_integrity()
        for peer in self._owners.router.peers:
            peer.check_idle()

    def shut_down(self) -> None:
        """Refuse new requests from now on."""
        self._is_shutting_down = True

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no request is live, at most `limit_s` seconds; tell whether that came true."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def generate(self, read: Read, timeline: Timeline) -> AsyncGenerator[list[TokenEvent]]:
        """Yield the tokens of the request that `read` returns as they come, at least one at a time.

        Raises: the error that ended it. Nothing stays held when this ends, but what cannot be taken back
        yet, which comes back on its own.
        """
        self._enter()
        request, outcome, reason = None, "failed", ""
        try:
            request = await self._read(read)
            logger.info("request.started", extra=_description(request))
            async with aclosing(self._run(request, timeline)) as lists:
                async for events in lists:
                    yield events
            outcome = "finished"
            self._owners.router.observe(request, timeline)
        except (asyncio.CancelledError, GeneratorExit):
            outcome = self._given_up(request, timeline)
            raise
        except KVSpanError as error:
            outcome, reason = "failed" if timeline.reserved_ns else "refused", error.code
            # What a client asked for, a shorter time included, is no loss.
            if request is not None and outcome == "failed" and not isinstance(error, RequestError):
                fields = log_fields(request_id=request.request_id, reason=reason, problem=str(error))
                logger.error("request.failed", extra=fields)
            raise
        finally:
            self._leave(request, outcome, reason)

    async def _read(self, read: Read) -> Request:
        """Return a request once it is read; nobody reads for a service that ends, or for a full queue."""
        if self._is_shutting_down:
            raise ShuttingDown("the decode service is shutting down")
        self._owners.admission.check_room(self._counts.reading)
        self._counts.reading += 1
        try:
            request = await read()
        finally:
            self._counts.reading -= 1
        if self._is_shutting_down:
            raise ShuttingDown("the decode service is shutting down")
        return request

    async def _run(self, request: Request, timeline: Timeline) -> AsyncGenerator[list[TokenEvent]]:
        """Publish one request and decode it."""
        request = self._owners.router.resolve(request)
        sequence = await self._publish_somewhere(request, timeline)
        try:
            self._owners.step_loop.start(sequence)
            async with aclosing(self._decode(sequence, timeline)) as lists:
                async for events in lists:
                    yield events
        finally:
            sequence.is_cancelled = True

    async def _publish_somewhere(self, request: Request, timeline: Timeline) -> Sequence:
        """Compute and publish a prompt; again, as the policy says, when its prefill service is lost.

        Nothing of a lost attempt was published, so no client can have seen a token of it.
        """
        attempt, session = 1, None
        while True:
            try:
                waiting = self._owners.admission.num_waiting
                session = self._owners.router.session_for(request, waiting, avoided=session)
                return await self._attempt(request, session, timeline, is_retry=attempt > 1)
            except LOSSES as error:
                was_granted = timeline.reserved_ns > 0
                request = await self._after_loss(request, attempt, error, was_granted=was_granted)
            attempt += 1
            timeline.spans.clear()

    async def _after_loss(
        self, request: Request, attempt: int, error: KVSpanError, *, was_granted: bool
    ) -> Request:
        """Return the request to try next; raises the error when the policy or the bound says so."""
        policy = self._owners.loss_policy
        was_never_started = isinstance(error, PeerUnavailable) and attempt == 1 and not was_granted
        if attempt >= MAX_ATTEMPTS or policy is LossPolicy.FAIL:
            raise error
        if policy is LossPolicy.LOCAL:
            request = replace(request, route=Route.LOCAL)
        elif was_never_started:
            raise error
        else:
            await self._owners.router.wait_open(REOPEN_WAIT_S)
        self._counts.retried += 1
        fields = log_fields(request_id=request.request_id, attempt=attempt + 1, cause=str(error))
        logger.warning("request.retried", extra=fields)
        return request

    async def _attempt(
        self, request: Request, session: PeerSession | None, timeline: Timeline, *, is_retry: bool
    ) -> Sequence:
        """Admit, prefill and publish once."""
        timeline.is_local = request.route is Route.LOCAL
        grant = await self._admit(request, session, is_retry=is_retry)
        timeline.reserved_ns = self._owners.clock.now_ns()
        try:
            return await self._prefill(request, session, grant, timeline)
        except BaseException:
            grant.reservation.drop(Holder.CLIENT)
            raise

    async def _admit(self, request: Request, session: PeerSession | None, *, is_retry: bool) -> Grant:
        """Wait for pages, lane and slot; a retry is first in the queue, which it was in before."""
        granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        ticket = self._ticket(request, session, granted)
        self._owners.admission.offer(ticket, is_first=is_retry)
        try:
            return await granted
        except asyncio.CancelledError:
            self._owners.admission.withdraw(ticket)
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._owners.router.refuse(granted.result(), session)
            raise

    async def _prefill(
        self, request: Request, session: PeerSession | None, grant: Grant, timeline: Timeline
    ) -> Sequence:
        """Compute the prompt where it was asked for, and publish it."""
        prefill = self._owners.router.begin(request, session, grant, timeline)
        self._counts.prompts_local += session is None
        self._counts.prompts_remote += session is not None
        try:
            generation = Answer(request, self._owners.tokenizer, self._owners.rng)
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

    def _ticket(
        self, request: Request, session: PeerSession | None, granted: asyncio.Future[Grant]
    ) -> Ticket:
        slots: SlotSource | None = session
        return Ticket(
            prompt_len=request.prompt_len,
            max_new_tokens=request.sampling.max_new_tokens,
            slots=slots,
            slot_bytes=self._owners.router.slot_bytes(request, session),
            granted=lambda grant: self._deliver_grant(grant, session, granted),
            failed=lambda error: None if granted.done() else granted.set_exception(error),
        )

    def _deliver_grant(
        self, grant: Grant, session: PeerSession | None, granted: asyncio.Future[Grant]
    ) -> None:
        """Hand a grant to the call that waits, or give it back when that call has just been cancelled."""
        self._owners.journal.reservation_made(grant.reservation)
        if granted.done():
            self._owners.router.refuse(grant, session)
        else:
            granted.set_result(grant)

    def _given_up(self, request: Request | None, timeline: Timeline) -> str:
        """Return how a request counts whose call was cancelled; a time limit is no wish of the client."""
        if request is None:
            return "refused"
        limit_s = request.time_limit_s - LATE_TOLERANCE_S
        is_late = self._owners.clock.now_ns() - timeline.arrived_ns >= limit_s * 1e9
        return "failed" if is_late else "cancelled"

    def _enter(self) -> None:
        self._counts.submitted += 1
        self._counts.live += 1
        self._idle.clear()

    def _leave(self, request: Request | None, outcome: str, reason: str) -> None:
        counts = self._counts
        counts.live -= 1
        counts.finished += outcome == "finished"
        counts.failed += outcome == "failed"
        counts.cancelled += outcome == "cancelled"
        counts.refused += outcome == "refused"
        if not counts.live:
            self._idle.set()
            # In a turn of its own, where a violation ends the service and not this call.
            asyncio.get_running_loop().call_soon(self._check_idle)
        if request is None:
            return
        why = {"reason": reason} if reason else {}
        fields = log_fields(request_id=request.request_id, outcome=outcome, **why)
        logger.info("request.ended", extra=fields)


def _description(request: Request) -> dict[str, object]:
    """Return the fields of the first line about a request, which joins our name for it with the client's."""
    theirs = {"client_request_id": request.client_request_id} if request.client_request_id else {}
    return log_fields(
        request_id=request.request_id,
        **theirs,
        tokens=request.prompt_len,
        route=request.route.value,
        mode=request.mode.value,
    )
