"""A decode peer of the prefill service with a real slab, and what a decode service would say to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.engine.prefill import PrefillEngine
from common.errors import KVSpanError
from common.kv.ranges import Range
from common.kv.spans import SPAN_LAYOUT, Span
from common.session.messages import CancelPrefill, PrefillMessage, SlabHandle, SpanSealed, StartPrefill
from common.slab.segment import SlabSegment
from prefill_service.decode_peer import DecodePeer, PeerContext
from prefill_service.job import Job, run_job
from prefill_service.queue import JobQueue
from tests.support.clock import ManualClock
from tests.support.factories import make_geometry
from tests.support.fakes import PatternEngine
from tests.support.sessions import GRANULARITY, make_hello, make_offer, make_start
from tests.support.slabs import make_slabs, served_slab

SLAB_BYTES = 65_536
CHUNK_TOKENS = GRANULARITY.chunk_tokens


@dataclass(slots=True)
class PeerDesk:
    """One session seen from decode: its slab, its queue of jobs, and the peer."""

    slab: SlabSegment
    context: PeerContext
    peer: DecodePeer
    idle: list[DecodePeer] = field(default_factory=list)
    """The peer, once for each time it said that nothing of it is left."""

    @property
    def num_mappings(self) -> int:
        """How often this process maps the slab, decode's own mapping included."""
        maps = Path("/proc/self/maps").read_text()
        return sum(self.slab.name in line for line in maps.splitlines())

    @property
    def queue(self) -> JobQueue[Job]:
        """The jobs of all sessions."""
        return self.context.queue

    @property
    def is_last(self) -> bool:
        """Whether the session goes after all others."""
        return self.queue.is_last(self.peer.number)

    async def greet(self) -> PrefillMessage | None:
        """Say Hello and return the answer."""
        handle = SlabHandle(self.slab.name, self.slab.size_bytes, SPAN_LAYOUT)
        self.peer.receive(replace(make_hello(), slab=handle))
        await self.peer.map_slab()
        return await self.peer.next_message()

    async def start(self, transfer_id: int = 21, time_limit_s: float = 30.0) -> StartPrefill:
        """Start a transfer in a slot of its own and see it accepted."""
        offset = 4096 + 8192 * (transfer_id - 21)
        start = make_start(transfer_id, slot_bytes=Range(offset, offset + 8192))
        start = replace(start, time_limit_s=time_limit_s)
        self.peer.receive(start)
        await self.peer.next_message()
        return start

    def take(self) -> Job:
        """Take the job whose turn it is as the engine loop does."""
        job = self.queue.take()
        assert job is not None
        assert self.peer.start(job)
        return job

    async def run(self, job: Job, engine: PrefillEngine | None = None) -> None:
        """Compute a job that was taken on another thread, and hand the outcome to the peer."""
        engine = engine or make_engine()
        try:
            result = await asyncio.to_thread(run_job, job, engine, GRANULARITY, ManualClock(50))
        except KVSpanError as error:
            self.peer.finish(job, error)
        else:
            self.peer.finish(job, result)

    def cancel(self, transfer_id: int = 21) -> None:
        """Ask for the end of a transfer."""
        self.peer.receive(CancelPrefill(transfer_id, 1, "REQUEST_CANCELLED"))

    async def said(self, count: int) -> list[PrefillMessage | None]:
        """Return the next messages."""
        return [await self.peer.next_message() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose job it is: a number, for a job that no engine loop runs."""

    number: int

    def start(self, job: Job) -> bool:
        """See `JobOwner`."""
        raise NotImplementedError

    def finish(self, job: Job, outcome: object) -> None:
        """See `JobOwner`."""
        raise NotImplementedError


def make_engine() -> PatternEngine:
    """Return an engine that fits `make_offer`."""
    return PatternEngine(make_geometry(), CHUNK_TOKENS, make_offer().max_prompt_tokens)


@contextmanager
def make_peer_desk(slab_dir: Path, queue: JobQueue[Job] | None = None, number: int = 3) -> Iterator[PeerDesk]:
    """Yield a session that waits for Hello; needs a running event loop."""
    queue = queue if queue is not None else JobQueue()
    idle: list[DecodePeer] = []
    context = PeerContext(make_offer(), slab_dir, make_slabs(), queue, ManualClock(10), 3.0, 7.0)
    with served_slab(slab_dir, SLAB_BYTES, "decode-boot") as slab:
        yield PeerDesk(slab, context, DecodePeer(number, context, idle.append), idle)


def spans_of(messages: Iterable[PrefillMessage | None]) -> list[Span]:
    """Return the spans sealed by these messages."""
    return [message.span for message in messages if isinstance(message, SpanSealed)]


async def turns(count: int = 5) -> None:
    """Let callbacks that are due run."""
    for _ in range(count):
        await asyncio.sleep(0)
