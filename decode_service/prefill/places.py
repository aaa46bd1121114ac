"""Where a prompt can be computed, and which of these places is chosen for it.

Theory of operation: a *place* is a session with a prefill service, or this process. It answers three
questions about a prompt: what it would need of the place, whether that could ever take it, and whether it can
now.
Nothing is decided before there are pages and a lane; then `choose` looks, in this order, at

    limits    places that could ever take the prompt
    avoided   of these, those at which it was not lost before, if there are any
    cost      of these, those of the cheaper route, when the wish leaves both open; a prefill service costs
              what it costs at the one that would take it now, else at the one that would be done first
    now       of these, the one with the fewest prompts that can take one more and that nobody waits for

A prompt for which the last set is empty waits for all places of the set before, and is bound to none of them.

Pure. Not here: which places there are (`decode_service/prefill/routing.py`), pages, lanes and the
queue (`decode_service/cache/admission.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from common.errors import KVSpanError, PromptTooLong, RequestError
from common.session.messages import TransferMode
from common.telemetry.timeline import Timeline
from decode_service.cache.admission import Choice, Wish
from decode_service.cache.reservation import Reservation
from decode_service.prefill.costs import CostModel, cheaper
from decode_service.publication import FinishedPrefill
from decode_service.request import Request, Route


class RunningPrefill(FinishedPrefill, Protocol):
    """A prompt that is being computed somewhere."""

    async def wait(self) -> None:
        """Wait until it is complete; raises the error that ended it."""

    def abort(self, error: KVSpanError) -> None:
        """Give it up; nothing happens when it has ended."""


class Place(Hashable, Protocol):
    """Where a prompt can be computed; compared by identity, one life of it is one place."""

    @property
    def name(self) -> str:
        """What logs call it: the address of a prefill service, or `local`."""

    @property
    def route(self) -> Route:
        """REMOTE or LOCAL."""

    @property
    def num_running(self) -> int:
        """Prompts that were begun there and still hold something of it."""

    @property
    def backlog_tokens(self) -> int:
        """Tokens of these prompts."""

    def slot_bytes(self, prompt_len: int, mode: TransferMode) -> int:
        """Return the slab bytes that a prompt needs there, none of it being cached; 0 where there is no slab.

        Only for a prompt that `refusal` has nothing against.
        """

    def refusal(self, prompt_len: int, mode: TransferMode) -> RequestError | None:
        """Return why the place could never take such a prompt, however idle; None when it could."""

    def can_take(self, slot_bytes: int) -> bool:
        """Tell whether `begin` would succeed now with a prompt that needs so many bytes."""

    def begin(self, request: Request, reservation: Reservation, timeline: Timeline) -> RunningPrefill:
        """Take what the prompt needs and start it into pages that are held; only while `can_take`."""


def choose(
    able: Sequence[Place], prompt_len: int, wish: Wish, ahead: Mapping[Place, int], costs: CostModel
) -> Choice[Place]:
    """Return the place that computes a prompt, or those it waits for.

    `able` are the places that could ever take it, one at least. `ahead` are those that others wait for who
    came before, with prompt tokens of these; none of them is chosen, so that who waits is overtaken only by
    those who go elsewhere.
    """
    places = [place for place in able if place not in wish.avoided] or able
    free = [
        place
        for place in places
        if place not in ahead and place.can_take(place.slot_bytes(prompt_len, wish.mode))
    ]
    estimates: dict[Route, float | None] = {}
    if len({place.route for place in places}) > 1:
        tokens = {place: prompt_len + place.backlog_tokens + ahead.get(place, 0) for place in places}
        seconds = {place: costs.estimate_s(place.name, count) for place, count in tokens.items()}
        estimates = {route: _expected(route, seconds, free) for route in (Route.REMOTE, Route.LOCAL)}
        route = cheaper(estimates)
        places, free = ([place for place in some if place.route is route] for some in (places, free))
    if free:
        return Choice(_idlest(free), (), estimates)
    return Choice(None, tuple(places), estimates)


def nearest(refusals: Iterable[RequestError]) -> RequestError:
    """Return the refusal of the place that came nearest to taking a prompt."""
    return max(refusals, key=_nearness)


def _nearness(refusal: RequestError) -> float:
    """Return the share of a prompt for which there would be room; what is no matter of size has none."""
    return refusal.limit / refusal.needed if isinstance(refusal, PromptTooLong) else 0.0


def _idlest(places: Sequence[Place]) -> Place:
    return min(places, key=lambda place: place.num_running)


def _expected(route: Route, seconds: Mapping[Place, float | None], free: Sequence[Place]) -> float | None:
    """Return the seconds by a route: at the place that takes it now, else at the one that is done first."""
    now = [place for place in free if place.route is route]
    asked = [_idlest(now)] if now else [place for place in seconds if place.route is route]
    known = [one for place in asked if (one := seconds[place]) is not None]
    # One that was never tried is worth a try.
    return min(known) if len(known) == len(asked) else None
