"""The tokens of a published request while they are generated.

Ownership: made by `publication.publish` on the event loop, used by the step loop alone until it is retired;
events travel back to the event loop through `deliver`.
"""

from __future__ import annotations

import asyncio

from common.engine.decode import LaneStep
from common.engine.prefill import Logits
from common.errors import KVSpanError
from decode_service.cache.reservation import Holder, Reservation
from decode_service.generate.answer import Answer, TokenEvent


class Sequence:
    """A lane's content: pages, the next token and its position."""

    def __init__(
        self, reservation: Reservation, answer: Answer, prompt_len: int, first_logits_V: Logits
    ) -> None:
        self._reservation = reservation
        self._answer = answer
        self._position = prompt_len
        # Invariant: position of the token that the next step feeds; all earlier ones have KV in the pages.
        self._next_token = -1
        self._first_logits_V = first_logits_V
        self._events: asyncio.Queue[TokenEvent | KVSpanError] = asyncio.Queue()
        self.is_cancelled = False
        """Set on the event loop, read by the step loop between steps."""

    @property
    def request_id(self) -> str:
        """Whose tokens these are, for the log."""
        return self._answer.request_id

    def first(self) -> TokenEvent:
        """Sample the first token from the handed-over logits; no decode step is needed for it."""
        event = self._answer.accept(self._first_logits_V)
        self._next_token = event.sampled.token_id
        return event

    def lane_step(self) -> LaneStep:
        """Return what the backend needs to compute the next token."""
        tables = self._reservation.pages.advance(self._position)
        return LaneStep(self._next_token, self._position, tables)

    def accept(self, logits_V: Logits) -> TokenEvent:
        """Take the logits that the step computed for this lane."""
        event = self._answer.accept(logits_V)
        self._next_token = event.sampled.token_id
        self._position += 1
        return event

    def deliver(self, event: TokenEvent | KVSpanError) -> None:
        """Hand an event to the call that waits for it."""
        self._events.put_nowait(event)

    def retire(self) -> None:
        """The step loop will not touch this sequence again."""
        self._reservation.drop(Holder.LANE)

    async def next_events(self) -> list[TokenEvent]:
        """Wait for at least one token and return all that are there.

        Raises: the error that ended the sequence.
        """
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        errors = [event for event in events if isinstance(event, KVSpanError)]
        if errors and not tokens:
            raise errors[0]
        for error in errors:
            self._events.put_nowait(error)
        return tokens
