"""Where a prompt is computed: which session, how much of its slab, and the start of the work.

Theory of operation: route `auto` becomes the cheaper one as measured (`costs.py`), and the estimates are
logged. A remote prompt goes to the open session with the fewest slots in use and asked for. What a place can
never hold is refused here, with the numbers, before anything is held.

Ownership: one per service, event loop only; owns the cost model.
Not here: when a request may start (`decode_service/cache/admission.py`), what happens when a peer is lost
(`decode_service/core.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from common.errors import KVSpanError, PeerLost, PromptTooLong
from common.kv.geometry import KVGeometry
from common.kv.plan import plan_spans
from common.kv.ring import slot_bytes
from common.session.messages import TransferMode
from common.slab.allocator import SLOT_ALIGNMENT
from common.telemetry.logging import log_fields
from common.telemetry.timeline import Timeline
from decode_service.cache.admission import Grant
from decode_service.cache.reservation import Holder
from decode_service.prefill.costs import CostModel
from decode_service.prefill.local_prefill import LocalEngine
from decode_service.prefill.peer_problem import unavailable
from decode_service.prefill.peer_session import PeerSession
from decode_service.prefill.prefill_client import PrefillPeer
from decode_service.publication import FinishedPrefill
from decode_service.request import Request, Route

logger = logging.getLogger(__name__)


class RunningPrefill(FinishedPrefill, Protocol):
    """A prompt that is being computed somewhere."""

    async def wait(self) -> None:
        """Wait until it is complete; raises the error that ended it."""

    def abort(self, error: KVSpanError) -> None:
        """Give it up; nothing happens when it has ended."""


class Router:
    """Knows every place that can compute a prompt."""

    def __init__(self, geometry: KVGeometry, local: LocalEngine, peers: tuple[PrefillPeer, ...]) -> None:
        self._geometry = geometry
        self._local = local
        self._peers = peers
        self._costs = CostModel()
        self._changed = asyncio.Event()

    @property
    def peers(self) -> tuple[PrefillPeer, ...]:
        """The prefill services."""
        return self._peers

    def note_change(self) -> None:
        """A session opened or closed: wake whoever waits for one."""
        self._changed.set()
        self._changed.clear()

    async def wait_open(self, limit_s: float) -> None:
        """Wait until some session is open, at most `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                while not any(peer.session for peer in self._peers):
                    await self._changed.wait()
        except TimeoutError:
            return

    def resolve(self, request: Request) -> Request:
        """Return the request with `auto` replaced by the route it stands for now."""
        if request.route is not Route.AUTO:
            return request
        if not self._peers:
            return replace(request, route=Route.LOCAL)
        backlogs = [peer.session.transfers.backlog_tokens for peer in self._peers if peer.session is not None]
        remote_backlog = min(backlogs, default=0)
        choice = self._costs.choose(request.prompt_len, remote_backlog, self._local.backlog_tokens)
        fields = log_fields(
            request_id=request.request_id,
            route=choice.route.value,
            remote_s=choice.remote_s,
            local_s=choice.local_s,
        )
        logger.info("route.chosen", extra=fields)
        return replace(request, route=choice.route)

    def observe(self, request: Request, timeline: Timeline) -> None:
        """Learn from a finished request, unless its prefill service has a clock that cannot be believed."""
        if timeline.has_clock_error:
            return
        route = Route.LOCAL if timeline.is_local else Route.REMOTE
        self._costs.observe(route, request.prompt_len, timeline.stages())

    def session_for(
        self,
        request: Request,
        num_waiting: Callable[[PeerSession], int],
        *,
        avoided: PeerSession | None = None,
    ) -> PeerSession | None:
        """Return the session that will compute the prompt, `avoided` only for want of another; None for this
        process.

        Raises: `PeerUnavailable` when a remote prompt finds no open session.
        """
        if request.route is Route.LOCAL:
            return None
        sessions = [peer.session for peer in self._peers if peer.session is not None]
        if not sessions:
            raise unavailable(peer.problem for peer in self._peers if peer.problem)
        others = [session for session in sessions if session is not avoided]
        return min(others or sessions, key=lambda session: session.slots.num_leased + num_waiting(session))

    def slot_bytes(self, request: Request, session: PeerSession | None) -> int:
        """Return the slab bytes the prompt needs; raises `PromptTooLong` when it can never fit."""
        limit = session.welcome.max_prompt_tokens if session else self._local.max_prompt_tokens
        if request.prompt_len > limit:
            raise PromptTooLong("prompt tokens", request.prompt_len, limit)
        if session is None:
            return 0
        plan = plan_spans(self._geometry, 0, request.prompt_len, session.welcome.granularity)
        can_reuse = request.mode is not TransferMode.DEFERRED
        return slot_bytes(plan, session.slots.capacity_bytes, SLOT_ALIGNMENT, can_reuse=can_reuse)

    def begin(
        self, request: Request, session: PeerSession | None, grant: Grant, timeline: Timeline
    ) -> RunningPrefill:
        """Start the prompt with what was granted.

        Raises: `PeerLost` when the session ended while the request waited; the slot is given back.
        """
        if session is None or grant.slot is None:
            return self._local.begin(request, grant.reservation, timeline)
        if not session.is_open or session.is_leaving:
            session.slots.free(grant.slot)
            raise PeerLost("the session ended while the request waited")
        return session.transfers.begin(request, grant.reservation, grant.slot, timeline)

    def refuse(self, grant: Grant, session: PeerSession | None) -> None:
        """Give back what was granted to a call that is gone."""
        if session is not None and grant.slot is not None:
            session.slots.free(grant.slot)
        grant.reservation.drop(Holder.CLIENT)
