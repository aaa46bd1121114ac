"""Both services in one event loop without grpc and without a model: everything else is the real thing.

Theory of operation: a decode core with admission, importer, pages and step loop, and one prefill service
whose session is joined to decode's by two tasks that carry messages. KV is a pattern, tokens count up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from common.errors import PeerLost
from common.kv.spans import SPAN_LAYOUT
from common.runtime.clock import SystemClock
from common.session.messages import DecodeMessage, SlabHandle, StartPrefill
from common.slab.segment import SlabSegment
from common.telemetry.timeline import Timeline
from decode_service.attempts import LossPolicy, Owners
from decode_service.cache.admission import Admission
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Reservation
from decode_service.core import DecodeCore, Read
from decode_service.generate.answer import TokenEvent
from decode_service.generate.step_loop import StepLoop
from decode_service.prefill.importer import Importer
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.local_prefill import LocalEngine
from decode_service.prefill.peer_problem import LEAVING, PeerProblem
from decode_service.prefill.peer_session import PeerSession, SessionContext
from decode_service.prefill.places import Place
from decode_service.prefill.remote_place import RemotePlace
from decode_service.prefill.routing import Router
from decode_service.request import Request
from prefill_service.decode_peer import DecodePeer, PeerContext
from prefill_service.engine_loop import EngineLoop
from prefill_service.queue import JobQueue
from tests.support.decoding import GEOMETRY, TOKENIZER
from tests.support.fakes import CountingBackend, PatternEngine
from tests.support.sessions import make_hello, make_identity, make_offer
from tests.support.slabs import make_slabs

IDENTITY = make_identity(GEOMETRY)
OFFER = replace(make_offer(IDENTITY), max_prompt_tokens=40, max_concurrency=2)
SLAB_BYTES = 65_536
NUM_PAGES = 12
NUM_LANES = 3
QUEUE_LIMIT = 2


def reader_of(request: Request) -> Read:
    """Return what the core is given for a request that was read."""

    async def read() -> Request:
        return request

    return read


class MemoryPeer:
    """What `PrefillPeer` is to the router: a session, and why there is none."""

    def __init__(self, name: str) -> None:
        self.is_reopening = False
        self._name = name
        self._sessions: list[PeerSession] = []
        self._place: RemotePlace | None = None

    @property
    def session(self) -> PeerSession | None:
        """The session, while transfers may start in it."""
        session = self._sessions[-1] if self._sessions else None
        return session if session is not None and session.is_open and not session.is_leaving else None

    @property
    def place(self) -> RemotePlace | None:
        """See `PrefillPeer`."""
        return self._place if self.session else None

    @property
    def problem(self) -> PeerProblem | None:
        """See `PrefillPeer`."""
        return None if self.session else LEAVING

    def join(self, session: PeerSession) -> None:
        """Have a new session."""
        self._sessions.append(session)
        self.put(RemotePlace(self._name, session))

    def put(self, place: RemotePlace) -> None:
        """Have a place from now on while the session is open."""
        self._place = place

    @property
    def last(self) -> PeerSession:
        """The session that was joined last, whatever became of it."""
        return self._sessions[-1]

    def check_integrity(self) -> None:
        """See `PrefillPeer`."""
        for session in self._sessions:
            session.check_integrity()

    def check_idle(self) -> None:
        """See `PrefillPeer`."""
        for session in self._sessions:
            session.check_idle()


class WatchedJournal(DecodeJournal):
    """A journal that tells a test of each grant before the call that waits for it hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.on_reserved: Callable[[], object] = lambda: None

    def reservation_made(self, reservation: Reservation) -> None:
        """See `DecodeJournal`."""
        super().reservation_made(reservation)
        self.on_reserved()


@dataclass(slots=True)
class MemoryPair:
    """Both services."""

    core: DecodeCore
    admission: Admission[Place]
    cache: KVCache
    backend: CountingBackend
    engine: PatternEngine
    """Of the prefill service."""

    local: PatternEngine
    """Of the decode service."""

    peers: tuple[MemoryPeer, ...]
    """Prefill services by name; all of them compute with the one engine."""

    changed: asyncio.Event
    """Set whenever something came back."""

    journal: WatchedJournal
    slab_dir: Path
    prefill: PeerContext
    decode: SessionContext
    decode_peers: list[DecodePeer] = field(default_factory=list)
    remotes: dict[PeerSession, DecodePeer] = field(default_factory=dict)
    """The other side of every session."""

    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def peer(self) -> MemoryPeer:
        """The first prefill service."""
        return self.peers[0]

    async def connect(self, number: int = 0) -> PeerSession:
        """Open a session with a prefill service."""
        slab = SlabSegment.create(self.slab_dir, SLAB_BYTES, "decode-boot")
        hello = replace(make_hello(IDENTITY), slab=SlabHandle(slab.name, slab.size_bytes, SPAN_LAYOUT))
        session, remote = (
            PeerSession(hello, slab, self.decode),
            DecodePeer(len(self.decode_peers), self.prefill, lambda idle: self.changed.set()),
        )
        self.peers[number].join(session)
        self.decode_peers.append(remote)
        self.tasks += [
            asyncio.create_task(to_prefill(session, remote)),
            asyncio.create_task(to_decode(session, remote)),
        ]
        self.remotes[session] = remote
        session.greet()
        while not session.is_open:
            self.changed.clear()
            await self.changed.wait()
        return session

    def cut(self, number: int = 0) -> None:
        """Break the stream with a prefill service: each side hears of it on its own."""
        session = self.peers[number].last
        session.close(PeerLost("the stream broke"))
        self.remotes[session].close()

    def leave(self, number: int = 0) -> None:
        """Have a prefill service shut down: it ends what it has."""
        self.remotes[self.peers[number].last].leave()

    def leave_upon_start(self) -> None:
        """Have prefill shut down while the next StartPrefill is under way, so that it crosses the GoAway."""
        remote = self.remotes[self.peer.last]
        receive = remote.receive

        def crossed(message: DecodeMessage) -> None:
            if isinstance(message, StartPrefill):
                remote.leave()
            receive(message)

        remote.receive = crossed  # type: ignore[method-assign]

    def begin(self, request: Request) -> AsyncGenerator[list[TokenEvent]]:
        """Return the tokens of a request as they will come."""
        return self.core.generate(reader_of(request), Timeline(SystemClock().now_ns()))

    async def generate(self, request: Request) -> list[TokenEvent]:
        """Run a request to its end."""
        return [event async for events in self.begin(request) for event in events]

    def assert_idle(self) -> None:
        """Check that nothing is held on either side."""
        self.core.check_integrity()
        statistics = self.admission.statistics()
        assert (statistics.lanes_used, statistics.num_queued) == (0, 0), statistics
        assert all(pool.free == pool.total for pool in self.cache.statistics().groups)
        assert all(peer.statistics().num_jobs == 0 for peer in self.decode_peers)
        assert self.core.counts.live == 0
        assert all(session.slots.num_leased == 0 for session in self.remotes)

    async def until_free(self) -> None:
        """Wait until no lane is held, whatever calls are still open."""
        while self.admission.statistics().lanes_used:
            self.changed.clear()
            await self.changed.wait()

    async def until_idle(self) -> None:
        """Wait until everything has come back on its own."""
        while self._is_busy():
            self.changed.clear()
            await self.changed.wait()
        self.assert_idle()

    def _is_busy(self) -> bool:
        num_jobs = sum(remote.statistics().num_jobs for remote in self.decode_peers)
        return bool(self.admission.statistics().lanes_used + num_jobs)


async def to_prefill(session: PeerSession, remote: DecodePeer) -> None:
    """Carry decode's messages."""
    while (message := await session.next_message()) is not None:
        remote.receive(message)
        await remote.map_slab()


async def to_decode(session: PeerSession, remote: DecodePeer) -> None:
    """Carry prefill's messages."""
    while (message := await remote.next_message()) is not None:
        session.receive(message)


@asynccontextmanager
async def memory_pair(
    slab_dir: Path, policy: LossPolicy = LossPolicy.FAIL, num_peers: int = 1
) -> AsyncIterator[MemoryPair]:
    """Yield both services with an open session each; checks at the end that nothing is left."""
    clock, journal, changed = SystemClock(), WatchedJournal(), asyncio.Event()
    cache = KVCache(GEOMETRY, (NUM_PAGES,))

    def on_freed(reservation: Reservation) -> None:
        journal.reservation_freed(reservation)
        changed.set()

    def on_change() -> None:
        admission.grant_waiting()
        router.note_change()
        changed.set()

    backend, engine, local = CountingBackend(GEOMETRY), make_engine(), make_engine()
    backend.allocate(4, (NUM_PAGES,))
    step_loop, importer = StepLoop(backend), Importer(GEOMETRY, backend, clock)
    peers = tuple(MemoryPeer(f"memory-{number}") for number in range(num_peers))
    local_engine = LocalEngine(local, backend, GEOMETRY, clock, journal, on_change)
    router = Router(local_engine, peers)
    admission = Admission(cache, router, NUM_LANES, QUEUE_LIMIT, on_freed)
    pair = MemoryPair(
        core=DecodeCore(Owners(TOKENIZER, admission, step_loop, router, policy, clock, Random(3), journal)),
        admission=admission,
        cache=cache,
        backend=backend,
        engine=engine,
        local=local,
        peers=peers,
        changed=changed,
        journal=journal,
        slab_dir=slab_dir,
        prefill=PeerContext(OFFER, slab_dir, make_slabs(), JobQueue(), clock, 30.0, 30.0),
        decode=SessionContext(importer, on_change, clock, journal),
    )
    try:
        async with connected(pair):
            yield pair
            await pair.until_idle()
    finally:
        await local_engine.close()
        await asyncio.to_thread(importer.stop)
        await asyncio.to_thread(step_loop.stop)


@asynccontextmanager
async def connected(pair: MemoryPair) -> AsyncIterator[None]:
    """Run the engine, with a session to each prefill service."""
    prefill = pair.prefill
    engine_loop = EngineLoop(pair.engine, OFFER.granularity, prefill.queue, prefill.clock)
    engine_task = asyncio.create_task(engine_loop.run())
    for number in range(len(pair.peers)):
        await pair.connect(number)
    try:
        yield
    finally:
        for number, peer in enumerate(pair.peers):
            if peer.last.is_open:
                pair.cut(number)
        await asyncio.gather(*pair.tasks)
        engine_task.cancel()
        await asyncio.gather(engine_task, return_exceptions=True)


def make_engine() -> PatternEngine:
    """Return an engine on the chunk grid of the session."""
    return PatternEngine(GEOMETRY, OFFER.granularity.chunk_tokens, OFFER.max_prompt_tokens)
