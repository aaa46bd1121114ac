"""Requests and sequences of the decode service without a prompt that was computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from random import Random

from common.engine.prefill import Logits
from common.errors import KVSpanError
from common.model.text.tokenizer import Tokenizer
from common.model.tiny import EOS_ID, VOCAB_SIZE, make_byte_tokenizer
from common.session.messages import TransferMode
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Reservation
from decode_service.generate.answer import Answer, TokenEvent
from decode_service.generate.sequence import Sequence
from decode_service.publication import publish
from decode_service.request import Request, Route, SamplingParams
from tests.support.factories import make_geometry, paged
from tests.support.fakes import CountingBackend, one_hot

TOKENIZER = Tokenizer(make_byte_tokenizer())
"""Token id b is the byte b."""

GEOMETRY = paged(make_geometry(vocab_size=VOCAB_SIZE))


def make_request(
    prompt: str = "abc",
    *,
    max_new_tokens: int = 4,
    stop: tuple[str, ...] = (),
    stop_ids: frozenset[int] = frozenset({EOS_ID}),
    route: Route = Route.REMOTE,
    mode: TransferMode = TransferMode.STREAM,
) -> Request:
    """Return a greedy request whose prompt is bytes."""
    return Request(
        request_id="000001",
        prompt_ids=tuple(prompt.encode()),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        stop=stop,
        stop_ids=stop_ids,
        route=route,
        mode=mode,
        time_limit_s=30.0,
    )


def make_answer(request: Request, tokenizer: Tokenizer = TOKENIZER) -> Answer:
    """Return the state of its tokens before the first."""
    return Answer(request, tokenizer, Random(5))


def logits_of(token_id: int) -> Logits:
    """Return logits that leave no doubt about the next token."""
    return one_hot(VOCAB_SIZE, token_id)


def generate(answer: Answer, token_ids: Tokens[int]) -> list[TokenEvent]:
    """Feed tokens until the answer ends."""
    events = []
    for token_id in token_ids:
        events.append(answer.accept(logits_of(token_id)))
        if events[-1].finish:
            break
    return events


@dataclass(slots=True)
class ProvenPrefill:
    """A finished prefill that proves itself, or raises why it cannot."""

    logits: Logits
    error: Exception | None = None
    num_settled: int = 0

    def prove_complete(self) -> Logits:
        """See `FinishedPrefill`."""
        if self.error is not None:
            raise self.error
        return self.logits

    def settle(self) -> None:
        """See `FinishedPrefill`."""
        self.num_settled += 1


@dataclass(slots=True)
class Lane:
    """A published sequence and what it holds."""

    sequence: Sequence
    reservation: Reservation
    freed: list[Reservation]

    @property
    def is_free(self) -> bool:
        """Whether its pages came back, once."""
        assert len(self.freed) < 2
        return bool(self.freed)

    def leave(self) -> None:
        """The client is gone."""
        self.sequence.is_cancelled = True

    async def events(self) -> list[TokenEvent]:
        """Return all tokens up to the last; raises what ended the sequence."""
        events: list[TokenEvent] = []
        while not events or events[-1].finish is None:
            events += await self.sequence.next_events()
        return events

    async def tokens(self) -> list[int]:
        """Return the ids of all tokens."""
        return [event.sampled.token_id for event in await self.events()]

    async def error(self) -> KVSpanError:
        """Return the error that ended the sequence."""
        try:
            while True:
                await self.sequence.next_events()
        except KVSpanError as error:
            return error


def make_lane(first: str, max_new_tokens: int = 4, prompt: str = "abc") -> Lane:
    """Return a published sequence whose first token will be the byte `first`."""
    request = make_request(prompt, max_new_tokens=max_new_tokens)
    pages = KVCache(GEOMETRY, (1 + (request.prompt_len + max_new_tokens) // 4,))
    freed: list[Reservation] = []
    reservation = Reservation(pages.reserve(request.prompt_len, max_new_tokens), freed.append)
    prefill = ProvenPrefill(logits_of(ord(first)))
    sequence = publish(reservation, prefill, make_answer(request), request.prompt_len)
    return Lane(sequence, reservation, freed)


@dataclass(slots=True)
class HeldBackend:
    """A counting backend whose every step waits to be let go."""

    backend: CountingBackend = field(default_factory=lambda: CountingBackend(GEOMETRY))
    failing_steps: set[int] = field(default_factory=set)
    """Numbers of the steps that raise once they are let go."""

    _entered: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    _may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()

        def on_step(number: int) -> None:
            loop.call_soon_threadsafe(self._entered.release)
            self._may_go.acquire()
            if number in self.failing_steps:
                raise RuntimeError("a device was lost")

        self.backend.on_step = on_step

    async def entered(self) -> None:
        """Wait until the next step has begun."""
        await self._entered.acquire()

    def let_go(self, steps: int = 1) -> None:
        """Let this many steps end."""
        self._may_go.release(steps)

    @property
    def batches(self) -> list[str]:
        """The tokens that each step was fed, as text."""
        return ["".join(chr(lane.token_id) for lane in batch) for batch in self.backend.batches]
