"""The composition root of the decode service: opens everything, serves, closes everything.

Theory of operation: the model is loaded and refused or accepted before anything else is allocated. Health is
SERVING while prompts are computed that name no route; `remote` has one of its own, which needs a session.
SIGTERM shuts down: NOT_SERVING first, new requests are refused, running ones may end within the grace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from common.engine.checks import check_backend
from common.engine.decode import DecodeBackend
from common.engine.options import Options
from common.engine.prefill import EngineDescription, PrefillEngine, peer_identity
from common.engine.registry import make
from common.engine.setup import BackendSetup
from common.model.prepare import TextSide, context_tokens, text_side
from common.model.text.process import TextProcess
from common.runtime.boot import new_boot_id
from common.runtime.clock import SystemClock
from common.runtime.memory import require_room
from common.runtime.service import Service
from common.runtime.threads import resolve_threads
from common.session.identity import NumericsPolicy, PeerIdentity
from common.session.messages import Hello, SlabHandle, TransferMode
from common.session.negotiation import PROTOCOL_VERSIONS
from common.slab.door import sweep
from common.slab.segment import SlabSegment
from common.telemetry.journal import open_journal
from common.telemetry.logging import log_fields
from common.wire.server import Server
from decode_service.api.servicer import DecodeServicer
from decode_service.api.status import Facts, Reporter, Sources
from decode_service.api.validation import RequestLimits, RequestReader
from decode_service.attempts import LossPolicy, Owners
from decode_service.cache.admission import Admission
from decode_service.cache.cache import KVCache
from decode_service.cache.spec import CacheGeometry, page_bytes, pool_pages
from decode_service.config import REMOTE_HEALTH, SERVICE_NAME, DecodeConfig
from decode_service.core import DecodeCore
from decode_service.generate.backends.table import BACKENDS
from decode_service.generate.step_loop import StepLoop
from decode_service.prefill.importer import Importer
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.local_prefill import LocalEngine
from decode_service.prefill.peer_connection import PeerConfig
from decode_service.prefill.peer_session import SessionContext
from decode_service.prefill.places import Place
from decode_service.prefill.prefill_client import PrefillPeer
from decode_service.prefill.routing import LocalUse, Router
from decode_service.request import Route
from kvspan.v1 import decode_pb2_grpc

logger = logging.getLogger(__name__)

GENERATE = f"/{SERVICE_NAME}/Generate"

SPARE_CALLS = 16
"""Calls beyond lanes and queue: those that are read, that are told their end, or that will be refused."""

CUT_S = 2.0
"""How long calls that were cut may take to tell their clients."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to decode with, and its cache."""

    backend: DecodeBackend
    text: TextSide
    max_context_tokens: int
    """Longest prompt with its answer."""

    threads: int
    num_pages: tuple[int, ...]


async def serve(config: DecodeConfig, on_ready: Callable[[str], None]) -> None:
    """Load the model and serve; see `Service.serve`."""
    await DecodeService(config, load(config)).serve(on_ready)


def load(config: DecodeConfig) -> Loaded:
    """Load the model and allocate the cache; blocking, before the event loop serves anything.

    Raises: `ConfigError` or `UnsupportedModel`; nothing stays allocated.
    """
    setup = BackendSetup(
        model=config.model,
        dtype=config.dtype,
        threads=resolve_threads(config.threads),
        chunk_tokens=config.chunk_tokens,
        max_prompt_tokens=config.cache_tokens,
        max_context_tokens=config.max_context_tokens,
        options=Options("backend_option", config.backend_option),
        show_progress=config.shows_progress,
        max_lanes=config.lanes,
    )
    backend = _make_backend(config, setup)
    text = text_side(setup, backend)
    geometry = CacheGeometry.of(backend.identity().geometry, config.page_tokens)
    num_pages = pool_pages(geometry, config.cache_tokens, config.lanes)
    _check_room(config, geometry, num_pages)
    backend.allocate(config.page_tokens, num_pages)
    most = backend.describe().max_context_tokens or context_tokens(config.max_context_tokens, text)
    longest = min(config.cache_tokens, most)
    return Loaded(backend, text, longest, setup.threads, num_pages)


def _make_backend(config: DecodeConfig, setup: BackendSetup) -> DecodeBackend:
    """Make the backend, and refuse what is asked of it that it does not do."""
    backend = make(BACKENDS, config.backend, config.backend_factory, setup)
    setting, asked = BACKENDS.asked(config.backend, config.backend_factory)
    check_backend(setting, asked, backend)
    flag, lanes = f"--{setting.replace('_', '-')}={asked}", backend.describe().max_lanes
    config.require(config.lanes <= lanes, "lanes", f"{flag} takes {lanes} at most")
    if backend.prefill_engine() is None:
        config.require(bool(config.prefill), "prefill", f"must name a service, {flag} decodes only")
        config.require(config.route != "local", "route", f"{flag} computes no prompts")
        is_local = config.on_prefill_loss == "local"
        config.require(not is_local, "on_prefill_loss", f"{flag} computes no prompts")
    return backend


def _check_room(config: DecodeConfig, geometry: CacheGeometry, num_pages: Sequence[int]) -> None:
    """Raise `ConfigError` when the cache cannot fit into memory: all of it is touched at once."""
    sizes = [page_bytes(group, geometry.page_tokens) for group in geometry.groups]
    needed = sum(size * pages for size, pages in zip(sizes, num_pages, strict=True))
    require_room("cache_tokens", config.cache_tokens, "the cache takes", needed)


def local_use_of(config: DecodeConfig) -> LocalUse:
    """Return what this process is for prompts whose route is open."""
    if config.numerics is NumericsPolicy.EXACT or not config.prefill:
        return LocalUse.FREE
    return LocalUse.LAST if config.on_prefill_loss == "local" else LocalUse.NONE


def _identity_of(backend: DecodeBackend, engine: PrefillEngine | None) -> PeerIdentity:
    """Return who this service is: with its own engine, or with what a backend without one says of itself."""
    if engine is not None:
        return peer_identity(engine.identity(), engine.describe())
    told = backend.describe()
    return peer_identity(backend.identity(), EngineDescription(told.name, told.numerics, max_prompt_tokens=1))


class DecodeService(Service):
    """Everything of one running decode service."""

    def __init__(self, config: DecodeConfig, loaded: Loaded) -> None:
        super().__init__()
        self._config = config
        self._loaded = loaded
        engine, geometry = loaded.backend.prefill_engine(), loaded.backend.identity().geometry
        self._identity = _identity_of(loaded.backend, engine)
        self._clock = SystemClock()
        self._boot_id = new_boot_id()
        self._record = open_journal(config.journal, self._boot_id, self._clock.now_ns)
        self._journal = DecodeJournal(self._record)
        self._importer = Importer(geometry, loaded.backend, self._clock)
        self._cache = KVCache(CacheGeometry.of(geometry, config.page_tokens), loaded.num_pages)
        self._step_loop = StepLoop(loaded.backend)
        self._local = (
            None
            if engine is None
            else LocalEngine(engine, loaded.backend, geometry, self._clock, self._journal, self._changed)
        )
        self._context = SessionContext(self._importer, self._changed, self._clock, self._journal)
        self._peers = tuple(self._make_peer(target) for target in config.prefill)
        self._router = Router(self._local, self._peers, local_use_of(config))
        self._admission = Admission(
            self._cache, self._router, config.lanes, config.queue_limit, self._journal.reservation_freed
        )
        self._core = self._make_core()
        self._text = TextProcess(loaded.text.tokenizer, loaded.text.eos_ids)
        self._server: Server | None = None
        self._servicer: DecodeServicer | None = None
        self._health = asyncio.Event()
        # Invariant: set by every change that may alter health; `_keep_health` clears and acts.

    @property
    def core(self) -> DecodeCore:
        """Requests and their counts."""
        return self._core

    @property
    def admission(self) -> Admission[Place]:
        """Reservations and the queue."""
        return self._admission

    @property
    def peers(self) -> tuple[PrefillPeer, ...]:
        """Prefill services."""
        return self._peers

    async def start(self) -> str:
        """Sweep left-overs, bind, serve, connect to the peers and return the address.

        Raises: `ConfigError`; everything has ended then, and `stop` must not be called.
        """
        try:
            return await self._open()
        except BaseException:
            if self._server is not None:
                await self._server.stop(0)
            await self._close()
            raise

    def _prepare_slab_dir(self) -> None:
        """Remove what dead owners left, and make sure that the slabs of all peers will fit.

        Raises: `ConfigError`, before anything is served.
        """
        directory, config = self._config.slab_folder, self._config
        for name in sweep(directory):
            logger.warning("slab.swept", extra=log_fields(name=name))
        if config.prefill:
            require_room("slab_bytes", config.slab_bytes, "the slabs take", config.slab_space_bytes)
            SlabSegment.create(directory, config.slab_space_bytes, self._boot_id).close()

    def remove_files(self) -> None:
        """Remove the names of all sockets at once; the process is about to end without stopping."""
        if self._server is not None:
            self._server.remove_sockets()
        for peer in self._peers:
            peer.shut_doors()

    async def stop(self) -> None:
        """Shut down: refuse what comes, then end requests, sessions and threads."""
        assert self._server is not None
        assert self._servicer is not None
        self._core.shut_down()
        await self._server.shut_down()
        logger.info("service.shutting_down", extra=log_fields(requests=self._core.counts.live))
        is_idle = await self._core.wait_idle(self._config.grace_s)
        if not is_idle:
            self._servicer.cut()
            await self._core.wait_idle(CUT_S)
        await self._server.stop(0)
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close()
        logger.info("service.stopped", extra=log_fields(was_idle=is_idle))
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    async def _open(self) -> str:
        self._journal.service_started(self._identity.geometry, self._loaded.num_pages)
        self._prepare_slab_dir()
        calls = self._config.lanes + self._config.queue_limit + SPARE_CALLS
        self._server = Server([SERVICE_NAME], limits={GENERATE: calls}, on_invariant=self.break_off)
        await asyncio.to_thread(self._text.start)
        reader = RequestReader(self._text, self._make_limits(), self._boot_id)
        reporter = self._make_reporter(self._server)
        servicer = self._servicer = DecodeServicer(self._core, reader, reporter, self._clock)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, self._server.grpc)
        address = self._server.listen(self._config.listen)
        await self._server.start()
        self._tasks = [asyncio.create_task(peer.run(), name=f"peer-{peer.target}") for peer in self._peers]
        self._tasks.append(asyncio.create_task(self._keep_health(self._server), name="health"))
        self._health.set()
        logger.info("service.ready", extra=log_fields(address=address, boot_id=self._boot_id))
        return address

    async def _close(self) -> None:
        """End the processes, the threads and the journal."""
        await asyncio.to_thread(self._text.close)
        if self._local is not None:
            await self._local.close()
        await asyncio.to_thread(self._importer.stop)
        await asyncio.to_thread(self._step_loop.stop)
        self._journal.service_stopped()
        self._record.close()

    def _changed(self) -> None:
        """Something opened, came back or went away: grant waiting requests, look at health."""
        self._admission.grant_waiting()
        self._router.note_change()
        self._health.set()

    async def _keep_health(self, server: Server) -> None:
        """Let health follow whether a prompt can be computed by the default route, and by `remote`."""
        while True:
            await self._health.wait()
            self._health.clear()
            has_session = any(peer.session for peer in self._peers)
            await (server.mark_serving if has_session else server.mark_not_serving)(REMOTE_HEALTH)
            can_compute = has_session or self._computes_by_default
            await (server.mark_serving if can_compute else server.mark_not_serving)()

    @property
    def _computes_by_default(self) -> bool:
        """Whether this process computes what the default route takes, while there is no session."""
        if self._local is None or self._default_route is Route.REMOTE:
            return False
        return self._default_route is Route.LOCAL or local_use_of(self._config) is not LocalUse.NONE

    @property
    def _default_route(self) -> Route:
        # Without a prefill service there is one route; a config that asks for another one is refused.
        return Route(self._config.route) if self._config.prefill else Route.LOCAL

    @property
    def _routes(self) -> tuple[Route, ...]:
        """What a request may ask for."""
        if not self._config.prefill:
            return (Route.LOCAL,)
        return (Route.AUTO, Route.REMOTE) if self._local is None else (Route.AUTO, Route.REMOTE, Route.LOCAL)

    def _make_peer(self, target: str) -> PrefillPeer:
        config = PeerConfig(
            self._make_hello,
            self._config.slab_folder,
            self._config.slab_bytes,
            self._boot_id,
            self._config.silence_limit_s,
            self._clock,
        )
        return PrefillPeer(target, config, self._context)

    def _make_hello(self, slab: SlabHandle) -> Hello:
        return Hello(
            versions=PROTOCOL_VERSIONS,
            boot_id=self._boot_id,
            identity=self._identity,
            modes=tuple(TransferMode),
            digests=(self._config.digest,),
            slab=slab,
            numerics_policy=self._config.numerics,
        )

    def _make_core(self) -> DecodeCore:
        return DecodeCore(
            Owners(
                tokenizer=self._loaded.text.tokenizer,
                admission=self._admission,
                step_loop=self._step_loop,
                router=self._router,
                loss_policy=LossPolicy(self._config.on_prefill_loss),
                clock=self._clock,
                journal=self._journal,
                rng=Random(),
            )
        )

    def _make_limits(self) -> RequestLimits:
        text, config = self._loaded.text, self._config
        return RequestLimits(
            model_name=text.name,
            vocab_size=self._identity.geometry.vocab_size,
            eos_ids=text.eos_ids,
            max_context_tokens=self._loaded.max_context_tokens,
            max_new_tokens=config.max_new_tokens,
            time_limit_s=config.time_limit_s,
            default_route=self._default_route,
            routes=self._routes,
            default_mode=config.transfer,
        )

    def _make_reporter(self, server: Server) -> Reporter:
        facts = Facts(
            boot_id=self._boot_id,
            identity=self._identity,
            limits=self._make_limits(),
            digests=(self._config.digest,),
            num_lanes=self._config.lanes,
            linears=self._loaded.backend.describe().kernels,
            num_threads=self._loaded.threads,
            page_tokens=self._config.page_tokens,
            numerics_policy=self._config.numerics,
        )
        sources = Sources(
            self._core,
            self._admission,
            self._cache,
            self._step_loop,
            self._peers,
            self._record,
            server.statistics,
        )
        return Reporter(facts, sources)
