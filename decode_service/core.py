"""The path of one request through the service: read, admitted, prefilled, published, decoded, given back.

Theory of operation: `generate` is one coroutine per request and reads as its life. Whatever ends it (success,
error, cancel, deadline), leaving it drops the CLIENT hold, stops what still runs for it, and returns at
once; pages and slot follow when the other holders have let go (`cache/reservation.py`).

Ownership: one per service, event loop only; owns nothing but the counts, and knows all owners.
Not here: tries of a prompt (`attempts.py`), messages (`api/servicer.py`), opening and closing (`app.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from common.errors import InvariantViolation, KVSpanError, RequestError, ShuttingDown
from common.telemetry.logging import log_fields
from common.telemetry.timeline import Timeline
from decode_service.attempts import Attempts, Owners
from decode_service.generate.answer import TokenEvent
from decode_service.generate.sequence import Sequence
from decode_service.request import Request, RequestCounts

logger = logging.getLogger(__name__)

Read = Callable[[], Awaitable[Request]]
"""Turns what a client sent into a request, or raises what is wrong with it."""

LATE_TOLERANCE_S = 0.05
"""A client's library ends its call at the same deadline, and its word may be here a moment before."""


class DecodeCore:
    """Runs requests."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._counts = RequestCounts()
        self._attempts = Attempts(owners, self._counts)
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
            self._owners.admission.grant_waiting()
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
        sequence = await self._attempts.publish(request, timeline)
        try:
            self._owners.step_loop.start(sequence)
            async with aclosing(self._decode(sequence, timeline)) as lists:
                async for events in lists:
                    yield events
        finally:
            sequence.is_cancelled = True

    async def _decode(self, sequence: Sequence, timeline: Timeline) -> AsyncGenerator[list[TokenEvent]]:
        while True:
            events = await sequence.next_events()
            now_ns = self._owners.clock.now_ns()
            timeline.first_token_ns = timeline.first_token_ns or now_ns
            timeline.last_token_ns = now_ns
            yield events
            if events[-1].finish is not None:
                return

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
