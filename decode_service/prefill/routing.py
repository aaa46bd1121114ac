"""Which places there are for a prompt, and which of them takes it.

Theory of operation: asked by admission whenever a request may be granted, so that what is decided holds: a
place that has gone meanwhile is not among those that are asked, and one that came is. A prompt that no place
could ever take is refused at once with the numbers of the one that comes nearest. But while a prefill service
that was asked for has no session, it may be the one that could take it: then that is said, with its problem.

Ownership: one per service, event loop only; owns the cost model.
Not here: the rule of the choice (`decode_service/prefill/places.py`), what happens when a peer is lost
(`decode_service/attempts.py`).
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

from common.errors import KVSpanError, RequestError
from common.telemetry.timeline import Timeline
from decode_service.cache.admission import Choice, Wish
from decode_service.prefill.costs import CostModel
from decode_service.prefill.peer_problem import PeerProblem, unavailable
from decode_service.prefill.places import Place, choose, nearest
from decode_service.request import Request, Route


class LocalUse(enum.Enum):
    """What this process is for a prompt whose route is open."""

    FREE = "free"
    """A place like any other: it computes as prefill services do."""

    LAST = "last"
    """The place for what no session can take: its tokens may be others."""

    NONE = "none"
    """No place; only who asks for it gets it."""


class Peer(Protocol):
    """One prefill service, by address."""

    @property
    def place(self) -> Place | None:
        """The session in which transfers may start now, if there is one."""

    @property
    def problem(self) -> PeerProblem | None:
        """Why there is none; None when there is."""

    @property
    def is_reopening(self) -> bool:
        """Whether there is none only because the next one is being opened beside one that was passed."""

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when a session contradicts itself."""

    def check_idle(self) -> None:
        """Raise `InvariantViolation` when something is held though no request is live."""


class Router:
    """Knows every place that can compute a prompt (`admission.Chooser`)."""

    def __init__(
        self, local: Place | None, peers: tuple[Peer, ...], local_use: LocalUse = LocalUse.FREE
    ) -> None:
        """Know this process, unless it computes no prompts, and the prefill services."""
        self._local_use = local_use
        self._local = local
        self._peers = peers
        self._costs = CostModel()
        self._changed = asyncio.Event()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The prefill services."""
        return self._peers

    def note_change(self) -> None:
        """A session opened or ended: wake whoever waits for one."""
        self._changed.set()
        self._changed.clear()

    async def wait_for_place(self, prompt_len: int, wish: Wish, limit_s: float) -> None:
        """Wait until some place could take the prompt, at most `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                while not self._able(prompt_len, wish)[0]:
                    await self._changed.wait()
        except TimeoutError:
            return

    def observe(self, request: Request, timeline: Timeline) -> None:
        """Learn from a finished request; choices may differ from now on.

        Not when its prefill service has a clock that cannot be believed.
        """
        if timeline.has_clock_error:
            return
        self._costs.observe(timeline.place, request.prompt_len, timeline.stages())

    def choose(self, prompt_len: int, wish: Wish, ahead: Mapping[Place, int]) -> Choice[Place]:
        """See `Chooser`."""
        able, refusals = self._able(prompt_len, wish)
        if able:
            return choose(able, prompt_len, wish, ahead, self._costs)
        # One prompt that does not drain costs those that wait no more than the moment until a new session.
        if wish.route is not Route.LOCAL and any(peer.is_reopening for peer in self._peers):
            return Choice(None)
        raise self._refusal(wish, refusals)

    def _able(self, prompt_len: int, wish: Wish) -> tuple[list[Place], list[RequestError]]:
        """Return the places that could ever take a prompt, and the refusals of the others."""
        sessions = [peer.place for peer in self._peers] if wish.route is not Route.LOCAL else []
        able: list[Place] = []
        refusals: list[RequestError] = []
        for place in (*sessions, self._local):
            if place is None or (place is self._local and not self._may_be_local(wish, able)):
                continue
            refusal = place.refusal(prompt_len, wish.mode)
            if refusal is None:
                able.append(place)
            else:
                refusals.append(refusal)
        return able, refusals

    def _may_be_local(self, wish: Wish, able: Sequence[Place]) -> bool:
        """Tell whether this process may compute a prompt that the sessions in `able` could take."""
        if wish.route is not Route.AUTO:
            return wish.route is Route.LOCAL
        # Where numerics are declared this process may give other tokens than a prefill service: nobody gets
        # them who did not ask for it, unless the operator prefers them to none.
        return self._local_use is LocalUse.FREE or (self._local_use is LocalUse.LAST and not able)

    def _refusal(self, wish: Wish, refusals: list[RequestError]) -> KVSpanError:
        """Return what a client is told whose prompt no place takes."""
        best = nearest(refusals) if refusals else None
        problems = [peer.problem for peer in self._peers if peer.problem]
        if best is None or (problems and wish.route is not Route.LOCAL):
            return unavailable(problems, best)
        return best
