"""How a prompt is computed and published: admitted, begun at a place, and tried again when that is lost.

Theory of operation: a prompt begins in the turn of the event loop in which it is granted, so that pages, lane
and slot are taken together and no place can go between. While it waits it depends on no place: it fails only
when the last one is gone that could take it. What becomes of it then, or when a place is lost with it, says
the policy.

    admitted --begun--> computed --> published
       |                   | place lost: another try, ahead of who waits, elsewhere if there is an elsewhere
       | last place gone: as if it came now, but RETRY waits for one

Ownership: one per service, event loop only; each prompt is owned by the coroutine that waits for it.
Not here: the rest of a request's life (`decode_service/core.py`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from common.errors import (
    Cancelled,
    InvariantViolation,
    KVSpanError,
    LeaseExpired,
    PeerLost,
    PeerUnavailable,
    PrefillEngineFailed,
)
from common.model.text.vocabulary import Vocabulary
from common.runtime.clock import Clock
from common.telemetry.logging import log_fields
from common.telemetry.timeline import Timeline
from decode_service.cache.admission import Admission, Grant, Ticket, Wish
from decode_service.cache.reservation import Holder, Reservation
from decode_service.generate.answer import Answer
from decode_service.generate.sequence import Sequence
from decode_service.generate.step_loop import StepLoop
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.places import Place, RunningPrefill
from decode_service.prefill.routing import Router
from decode_service.publication import publish
from decode_service.request import Request, RequestCounts, Route

logger = logging.getLogger(__name__)


class LossPolicy(enum.Enum):
    """What becomes of a request whose prefill service is lost before it was done with it."""

    FAIL = "fail"
    """UNAVAILABLE; the client may try again."""

    RETRY = "retry"
    """Run again in another session, also one that is opened meanwhile."""

    LOCAL = "local"
    """Run again in this process."""


LOSSES = (PeerLost, PeerUnavailable, PrefillEngineFailed, LeaseExpired)
"""Ends of an attempt after which another prefill service, or this process, may do better.

So it is with a lease that expired: a prompt that got no credit yields the engine to who waits, and needs none
when it is computed here. Where its time is over, that of the request is over too.
"""

MAX_ATTEMPTS = 3
"""Tries of one request, the first included."""

REOPEN_WAIT_S = 10.0
"""How long a request waits for a place that could take it, once the last one is gone."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Everything a request passes through."""

    tokenizer: Vocabulary
    admission: Admission[Place]
    step_loop: StepLoop
    router: Router
    loss_policy: LossPolicy
    clock: Clock
    rng: Random
    """Seeds requests that bring no seed."""

    journal: DecodeJournal = field(default_factory=DecodeJournal)


@dataclass(slots=True)
class _Attempt:
    """One try of a request."""

    request: Request
    timeline: Timeline
    number: int = 1
    avoided: frozenset[Place] = frozenset()
    """Places at which earlier tries were lost."""

    was_queued: bool = False
    """Whether there was a place for it when it came."""

    place: Place | None = None
    """Where it was begun."""

    @property
    def wish(self) -> Wish:
        """What admission is told."""
        return Wish(self.request.route, self.request.mode, self.avoided)

    def following(self, request: Request) -> _Attempt:
        """Return the next try, which avoids the place of this one."""
        avoided = self.avoided | ({self.place} if self.place else set())
        return _Attempt(request, self.timeline, self.number + 1, avoided)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A prompt that was granted and begun; both end with `publish` or `give_up`."""

    reservation: Reservation
    prefill: RunningPrefill
    is_local: bool

    def give_up(self, error: BaseException) -> None:
        """Stop the prefill and let go of the pages."""
        self.prefill.abort(error if isinstance(error, KVSpanError) else Cancelled(type(error).__name__))
        self.reservation.drop(Holder.CLIENT)


class Attempts:
    """Gets prompts computed and published."""

    def __init__(self, owners: Owners, counts: RequestCounts) -> None:
        """Start with none; prompts and tries are counted in `counts`."""
        self._owners = owners
        self._counts = counts

    async def publish(self, request: Request, timeline: Timeline) -> Sequence:
        """Compute a prompt and return the sequence that reads it, once it is published.

        Nothing of a lost attempt was published, so no client can have seen a token of it.

        Raises: the error that ended the last attempt; the request holds nothing then.
        """
        attempt = _Attempt(request, timeline)
        while True:
            try:
                return await self._try(attempt)
            except LOSSES as error:
                attempt = await self._after_loss(attempt, error)
            timeline.spans.clear()

    async def _after_loss(self, attempt: _Attempt, error: KVSpanError) -> _Attempt:
        """Return what to try next; raises the error when the policy or the bound says so.

        A prompt that a peer turned away, because it shuts down, has lost nothing: it goes to another place
        whatever the policy is. One for which there was no place when it came is tried again by LOCAL only.
        """
        policy, request = self._owners.loss_policy, attempt.request
        was_turned_away = attempt.place is not None and isinstance(error, PeerUnavailable)
        may_go_on = policy is LossPolicy.LOCAL or (policy is LossPolicy.RETRY and attempt.was_queued)
        if attempt.number >= MAX_ATTEMPTS or not (may_go_on or was_turned_away):
            raise error
        if policy is LossPolicy.LOCAL:
            request = replace(request, route=Route.LOCAL)
        following = attempt.following(request)
        if policy is LossPolicy.RETRY:
            # The others go at once: LOCAL has its place, and what was turned away is refused by admission if
            # there is no other place.
            await self._owners.router.wait_for_place(request.prompt_len, following.wish, REOPEN_WAIT_S)
        self._counts.retried += 1
        fields = log_fields(request_id=request.request_id, attempt=following.number, cause=str(error))
        logger.warning("request.retried", extra=fields)
        return following

    async def _try(self, attempt: _Attempt) -> Sequence:
        """Admit, prefill and publish once."""
        begun = await self._admit(attempt)
        self._counts.prompts_local += begun.is_local
        self._counts.prompts_remote += not begun.is_local
        try:
            answer = Answer(attempt.request, self._owners.tokenizer, self._owners.rng)
            await begun.prefill.wait()
            sequence = publish(
                begun.reservation,
                begun.prefill,
                answer,
                attempt.request.prompt_len,
                self._owners.journal.reservation_published,
            )
        except BaseException as error:
            begun.give_up(error)
            raise
        attempt.timeline.published_ns = self._owners.clock.now_ns()
        return sequence

    async def _admit(self, attempt: _Attempt) -> _Begun:
        """Wait for pages, a lane and a place, where the prompt begins in the turn in which it is granted."""
        begun: asyncio.Future[_Begun] = asyncio.get_running_loop().create_future()
        ticket = Ticket(
            prompt_len=attempt.request.prompt_len,
            max_new_tokens=attempt.request.sampling.max_new_tokens,
            wish=attempt.wish,
            granted=partial(self._begin, attempt, begun),
            failed=lambda error: None if begun.done() else begun.set_exception(error),
            is_first=attempt.number > 1,
        )
        self._owners.admission.offer(ticket)
        attempt.was_queued = True
        try:
            return await begun
        except asyncio.CancelledError as error:
            self._owners.admission.withdraw(ticket)
            # Granted in the turn in which its call was cancelled: nobody else will see what came of that.
            if begun.done() and not begun.cancelled():
                failure = begun.exception()
                if isinstance(failure, InvariantViolation):
                    raise failure from error
                if failure is None:
                    begun.result().give_up(error)
            raise

    def _begin(self, attempt: _Attempt, begun: asyncio.Future[_Begun], grant: Grant[Place]) -> None:
        """Begin a prompt where it was granted; give everything back when its call has just been cancelled."""
        reservation, place = grant.reservation, grant.place
        self._owners.journal.reservation_made(reservation)
        if begun.done():
            # Cancelled in this very turn, before it could withdraw its ticket.
            reservation.drop(Holder.CLIENT)
            return
        attempt.place = place
        attempt.timeline.reserved_ns = self._owners.clock.now_ns()
        attempt.timeline.place = place.name
        attempt.timeline.is_local = place.route is Route.LOCAL
        _log_choice(attempt.request, grant)
        try:
            prefill = place.begin(attempt.request, reservation, attempt.timeline)
        except Exception as error:  # noqa: BLE001 - whoever gave something back is not to blame for it
            reservation.drop(Holder.CLIENT)
            begun.set_exception(error)
        else:
            begun.set_result(_Begun(reservation, prefill, is_local=attempt.timeline.is_local))


def _log_choice(request: Request, grant: Grant[Place]) -> None:
    estimates = {f"{route.value}_s": seconds for route, seconds in grant.choice.estimates.items()}
    place, request_id = grant.place, request.request_id
    fields = log_fields(request_id=request_id, route=place.route.value, place=place.name, **estimates)
    logger.info("route.chosen", extra=fields)
