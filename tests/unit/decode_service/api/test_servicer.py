"""Calls of clients: read beside the event loop when that takes long, and counted however they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from common.errors import DeadlineExceeded, InvalidRequest, PromptTooLong, QueueFull, ShuttingDown
from common.model.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from common.model.tiny import VOCAB_SIZE, make_byte_tokenizer
from common.runtime.clock import SystemClock
from common.session.messages import TransferMode
from decode_service.api.servicer import MAX_LONG_READS, DecodeServicer
from decode_service.api.validation import RequestLimits, RequestReader
from decode_service.request import RequestCounts, Route
from kvspan.v1 import decode_pb2 as pb
from tests.support.memory_pair import NUM_LANES, QUEUE_LIMIT, MemoryPair, memory_pair

if TYPE_CHECKING:
    from decode_service.api.status import Reporter

pytestmark = pytest.mark.usefixtures("leak_check")

LONG_S = 20.0
"""Longest time a thread of a test may take; it takes milliseconds."""

BOOT_ID = "5e3a90b1c2d4f607"

LIMITS = RequestLimits(
    model_name="tiny",
    vocab_size=VOCAB_SIZE,
    eos_ids=(),
    max_context_tokens=47,
    max_new_tokens=3,
    time_limit_s=60.0,
    default_route=Route.LOCAL,
    routes=(Route.LOCAL,),
    default_mode=TransferMode.STREAM,
)
SHORT = pb.GenerateRequest(text="abc")
LONG = pb.GenerateRequest(text="x" * (LONG_TEXT_CHARS + 1))
"""Never fits, once it has been read."""


class HeldTokenizer(Tokenizer):
    """Holds each long text on the thread that reads it until it is let go."""

    def __init__(self) -> None:
        super().__init__(make_byte_tokenizer())
        self._loop, self.entered = asyncio.get_running_loop(), asyncio.Semaphore(0)
        self.may_go = threading.Event()

    def encode(self, text: str, *, is_literal: bool = False, max_tokens: int | None = None) -> list[int]:
        """See `Tokenizer`."""
        if len(text) > LONG_TEXT_CHARS:
            self._loop.call_soon_threadsafe(self.entered.release)
            assert self.may_go.wait(LONG_S)
        return super().encode(text, max_tokens=max_tokens)


@dataclass(slots=True)
class Call:
    """What a servicer sees of a client, and what it has told it."""

    remaining_s: float | None = None
    written: list[pb.GenerateResponse] = field(default_factory=list)

    def time_remaining(self) -> float | None:
        """Return the client's deadline."""
        return self.remaining_s

    async def write(self, response: pb.GenerateResponse) -> None:
        """Take a message."""
        self.written.append(response)

    @property
    def text(self) -> str:
        """What came so far."""
        return "".join(response.text for response in self.written)


@dataclass(slots=True)
class Desk:
    """A servicer over a whole decode service, and its tokenizer."""

    pair: MemoryPair
    servicer: DecodeServicer
    tokenizer: HeldTokenizer

    def call(self, request: pb.GenerateRequest, remaining_s: float | None = None) -> asyncio.Task[Call]:
        """Ask beside the test."""

        async def run() -> Call:
            call = Call(remaining_s)
            await self.servicer.Generate(request, cast("Any", call))
            return call

        return asyncio.create_task(run())

    @property
    def counts(self) -> RequestCounts:
        """Requests so far."""
        return self.pair.core.counts


@asynccontextmanager
async def make_desk(slab_dir: Path) -> AsyncIterator[Desk]:
    """Yield a servicer; long texts are let go at the end."""
    async with memory_pair(slab_dir) as pair:
        tokenizer, reporter = HeldTokenizer(), cast("Reporter", None)
        servicer = DecodeServicer(
            pair.core, RequestReader(tokenizer, LIMITS, BOOT_ID), reporter, SystemClock()
        )
        try:
            yield Desk(pair, servicer, tokenizer)
        finally:
            tokenizer.may_go.set()


async def test_a_request_is_answered_to_its_last_token(slab_dir: Path) -> None:
    """The last message says how it ended."""
    async with make_desk(slab_dir) as desk:
        call = await desk.call(SHORT)

        assert call.text == "def"
        assert call.written[-1].usage.prompt_tokens == 4
        assert (desk.counts.submitted, desk.counts.finished) == (1, 1)


async def test_others_are_served_while_a_long_text_is_read(slab_dir: Path) -> None:
    """The event loop goes on: pings go out, and neighbours get their tokens."""
    async with make_desk(slab_dir) as desk:
        reading = desk.call(LONG)
        await desk.tokenizer.entered.acquire()

        assert (await desk.call(SHORT)).text == "def"

        desk.tokenizer.may_go.set()
        with pytest.raises(PromptTooLong, match="prompt bytes"):
            await reading
        assert (desk.counts.finished, desk.counts.refused) == (1, 1)


async def test_a_few_long_texts_are_read_at_a_time(slab_dir: Path) -> None:
    """So that one client cannot take all cores; the others wait their turn."""
    async with make_desk(slab_dir) as desk:
        readings = [desk.call(LONG) for _ in range(MAX_LONG_READS + 1)]
        for _ in range(MAX_LONG_READS):
            await desk.tokenizer.entered.acquire()

        await desk.call(SHORT)
        assert desk.tokenizer.entered.locked()

        desk.tokenizer.may_go.set()
        outcomes = await asyncio.gather(*readings, return_exceptions=True)
        assert all(isinstance(outcome, PromptTooLong) for outcome in outcomes)


async def test_a_text_that_is_read_is_counted_and_waited_for(slab_dir: Path) -> None:
    """It is a request like any other for who looks at the service or ends it."""
    async with make_desk(slab_dir) as desk:
        reading = desk.call(LONG)
        await desk.tokenizer.entered.acquire()

        assert (desk.counts.live, desk.counts.reading) == (1, 1)
        assert not await desk.pair.core.wait_idle(0.0)

        desk.tokenizer.may_go.set()
        assert await desk.pair.core.wait_idle(LONG_S)
        await asyncio.gather(reading, return_exceptions=True)
        assert (desk.counts.live, desk.counts.reading) == (0, 0)


async def test_texts_that_are_read_fill_the_queue(slab_dir: Path) -> None:
    """The next one is refused before it is tokenized, for which it would wait, only to be refused then."""
    async with make_desk(slab_dir) as desk:
        readings = [desk.call(LONG) for _ in range(NUM_LANES + QUEUE_LIMIT)]
        for _ in range(MAX_LONG_READS):
            await desk.tokenizer.entered.acquire()

        with pytest.raises(QueueFull):
            await desk.call(LONG)

        desk.tokenizer.may_go.set()
        outcomes = await asyncio.gather(*readings, return_exceptions=True)
        assert all(isinstance(outcome, PromptTooLong) for outcome in outcomes)


async def test_nobody_reads_for_a_service_that_ends(slab_dir: Path) -> None:
    """The text would be tokenized to be refused."""
    async with make_desk(slab_dir) as desk:
        desk.pair.core.shut_down()

        with pytest.raises(ShuttingDown):
            await desk.call(LONG)

        assert desk.tokenizer.entered.locked()
        assert (desk.counts.submitted, desk.counts.refused) == (1, 1)


async def test_a_client_that_leaves_while_its_text_is_read_is_gone_at_once(slab_dir: Path) -> None:
    """It held nothing, and is counted."""
    async with make_desk(slab_dir) as desk:
        reading = desk.call(LONG)
        await desk.tokenizer.entered.acquire()

        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

        assert (desk.counts.submitted, desk.counts.refused) == (1, 1)
        desk.pair.core.check_integrity()


async def test_the_time_limit_runs_while_a_text_is_read(slab_dir: Path) -> None:
    """Nobody waits for a tokenizer for ever."""
    async with make_desk(slab_dir) as desk:
        with pytest.raises(DeadlineExceeded):
            await desk.call(LONG, remaining_s=0.0)

        assert (desk.counts.submitted, desk.counts.refused) == (1, 1)


async def test_a_call_that_is_read_when_the_grace_is_over_is_told_so(slab_dir: Path) -> None:
    """As one that decodes."""
    async with make_desk(slab_dir) as desk:
        reading = desk.call(LONG)
        await desk.tokenizer.entered.acquire()

        desk.servicer.cut()

        with pytest.raises(ShuttingDown):
            await reading


async def test_a_request_that_is_wrong_is_counted_as_refused(slab_dir: Path) -> None:
    """Also one that never came to the core."""
    async with make_desk(slab_dir) as desk:
        with pytest.raises(InvalidRequest):
            await desk.call(pb.GenerateRequest())

        assert (desk.counts.submitted, desk.counts.refused) == (1, 1)
