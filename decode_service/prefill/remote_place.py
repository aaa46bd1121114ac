"""A session with a prefill service as a place for prompts.

Ownership: made by `PrefillPeer` with each session, and of no use after it. Event loop only.
"""

from __future__ import annotations

from common.errors import InvalidRequest, PromptTooLong, RequestError, Violation
from common.kv.plan import most_steps, plan_spans
from common.kv.ring import slot_bytes
from common.session.messages import TransferMode
from common.slab.allocator import SLOT_ALIGNMENT
from common.telemetry.timeline import Timeline
from decode_service.cache.reservation import Reservation
from decode_service.prefill.peer_session import PeerSession
from decode_service.prefill.remote_prefill import RemotePrefill
from decode_service.request import Request, Route

MAX_PLAN_STEPS = 1 << 17
"""Chunks of a prompt and spans of a chunk; a model of 128 layers has 32,768 in chunks of 1 MiB a layer."""


class RemotePlace:
    """One session (`places.Place`)."""

    route = Route.REMOTE

    def __init__(self, name: str, session: PeerSession) -> None:
        self._name = name
        self._session = session
        self._needed_bytes: dict[tuple[int, bool], int] = {}
        # Invariant: what a prompt of a length needs, by whether bytes of its slot can be used twice. Kept, as
        # every waiting prompt is looked at whenever something comes back, and a plan takes a millisecond.

    @property
    def name(self) -> str:
        """Address of the prefill service."""
        return self._name

    @property
    def num_running(self) -> int:
        """Slots in use."""
        return self._session.slots.num_leased

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens of the transfers that are not drained."""
        return self._session.transfers.backlog_tokens

    def slot_bytes(self, prompt_len: int, mode: TransferMode) -> int:
        """See `Place`: the whole KV of the prompt, or a ring through which it streams."""
        # Only a mode that seals spans before the end can have their bytes back before the end.
        key = (prompt_len, mode is not TransferMode.DEFERRED)
        if key not in self._needed_bytes:
            self._needed_bytes[key] = self._plan_bytes(*key)
        return self._needed_bytes[key]

    def refusal(self, prompt_len: int, mode: TransferMode) -> RequestError | None:
        """See `Place`: the modes and the longest prompt of the peer, then the slab."""
        modes = self._session.welcome.modes
        # Services fit that have one mode in common, so another one may still be asked for.
        if mode not in modes:
            spoken = ", ".join(one.value for one in modes)
            problem = f"is {mode.value}, the prefill service takes {spoken}"
            return InvalidRequest([Violation("transfer", problem)])
        limit, capacity = self._session.welcome.max_prompt_tokens, self._session.slots.capacity_bytes
        if prompt_len > limit:
            return PromptTooLong("prompt tokens", prompt_len, limit)
        steps = most_steps(self._session.geometry, prompt_len, self._session.welcome.granularity)
        if steps > MAX_PLAN_STEPS:
            # Told by the peer: planned it would cost this process more than any honest prompt.
            return PromptTooLong("spans and chunks of the prefill service", steps, MAX_PLAN_STEPS)
        needed = self.slot_bytes(prompt_len, mode)
        return PromptTooLong("slab bytes", needed, capacity) if needed > capacity else None

    def can_take(self, slot_bytes: int) -> bool:
        """See `Place`: the peer takes one more transfer, and the slab has a gap for it."""
        session = self._session
        if not session.is_open or session.is_leaving:
            return False
        return self.num_running < session.welcome.max_concurrency and session.slots.can_lease(slot_bytes)

    def begin(self, request: Request, reservation: Reservation, timeline: Timeline) -> RemotePrefill:
        """See `Place`."""
        welcome = self._session.welcome
        timeline.engine, timeline.numerics = welcome.engine.name, welcome.identity.numerics.engine
        slot = self._session.slots.lease(self.slot_bytes(request.prompt_len, request.mode))
        return self._session.transfers.begin(request, reservation, slot, timeline)

    def _plan_bytes(self, prompt_len: int, can_reuse: bool) -> int:
        """Return the bytes of the slot to lease; more than the slab has when it can never hold the prompt."""
        session = self._session
        required = session.geometry.required(0, prompt_len)
        plan = plan_spans(session.geometry, required, session.welcome.granularity)
        try:
            return slot_bytes(plan, session.slots.capacity_bytes, SLOT_ALIGNMENT, can_reuse=can_reuse)
        except PromptTooLong as error:
            return error.needed
