"""The composition root of the prefill service: opens everything, serves, closes everything.

Theory of operation: the model is loaded and refused or accepted before anything else is allocated. Upon
SIGTERM health says NOT_SERVING, no new session or job is taken, queued and running jobs may end within the
grace, each peer leaves when it has heard how its own ended or is cut off, and the engine's thread ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.engine.checks import check_engine
from common.engine.options import Options
from common.engine.prefill import PrefillEngine, peer_identity
from common.engine.registry import make
from common.engine.setup import EngineSetup
from common.kv.digest import DigestKind
from common.kv.plan import SpanGranularity
from common.kv.spans import SPAN_LAYOUT
from common.runtime.boot import new_boot_id
from common.runtime.clock import SystemClock
from common.runtime.service import Service
from common.runtime.threads import resolve_threads
from common.session.identity import EngineFacts
from common.session.messages import TransferMode
from common.session.negotiation import PROTOCOL_VERSIONS, PrefillOffer
from common.slab.mapped import MappedSlabs
from common.telemetry.journal import open_journal
from common.telemetry.logging import log_fields
from common.wire.interceptor import CallStatistics
from common.wire.server import Server
from kvspan.v1 import transfer_pb2_grpc
from prefill_service.config import PrefillConfig
from prefill_service.decode_peer import PeerContext
from prefill_service.engine_loop import EngineLoop
from prefill_service.engines.table import ENGINES
from prefill_service.job import Job
from prefill_service.journaling import PrefillJournal
from prefill_service.queue import JobQueue
from prefill_service.servicer import PrefillServicer

logger = logging.getLogger(__name__)

SERVICE_NAME = "kvspan.v1.PrefillService"

MAX_SESSIONS = 32
"""Decode services at the same time; each has a stream and a slab that is mapped here."""

LAST_WORDS_S = 2.0
"""How long a service that shuts down may take to say what its sessions still have to hear."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine ready to compute."""

    engine: PrefillEngine
    threads: int


async def serve(config: PrefillConfig, on_ready: Callable[[str], None]) -> None:
    """Load the model and serve; see `Service.serve`."""
    await PrefillService(config, load(config)).serve(on_ready)


def load(config: PrefillConfig) -> Loaded:
    """Make the engine; blocking, before the event loop serves anything.

    Raises: `ConfigError` or `UnsupportedModel`; nothing stays allocated.
    """
    setup = EngineSetup(
        model=config.model,
        dtype=config.dtype,
        threads=resolve_threads(config.threads),
        chunk_tokens=config.chunk_tokens,
        max_prompt_tokens=config.max_prompt_tokens,
        max_context_tokens=config.max_context_tokens,
        options=Options("engine_option", config.engine_option),
        show_progress=config.shows_progress,
    )
    engine = make(ENGINES, config.engine, config.engine_factory, setup)
    check_engine(*ENGINES.asked(config.engine, config.engine_factory), engine)
    return Loaded(engine, setup.threads)


class PrefillService(Service):
    """Everything of one running prefill service."""

    def __init__(self, config: PrefillConfig, loaded: Loaded) -> None:
        super().__init__()
        self._config = config
        self._clock = SystemClock()
        self._queue: JobQueue[Job] = JobQueue()
        self._offer = make_offer(config, loaded)
        self._record = open_journal(config.journal, self._offer.boot_id, self._clock.now_ns)
        self._journal = PrefillJournal(self._record)
        self._engine_loop = EngineLoop(loaded.engine, self._offer.granularity, self._queue, self._clock)
        self._servicer = PrefillServicer(
            self._make_context(),
            self._engine_loop,
            self._count_calls,
            loaded.engine.describe().kernels,
            loaded.threads,
        )
        self._server: Server | None = None

    @property
    def servicer(self) -> PrefillServicer:
        """The peers and their counts."""
        return self._servicer

    @property
    def engine_loop(self) -> EngineLoop:
        """What computes, and the job that it has."""
        return self._engine_loop

    async def start(self) -> str:
        """Bind, serve and return the address."""
        self._journal.service_started(self._offer.identity.geometry)
        limits = {f"/{SERVICE_NAME}/Transfer": MAX_SESSIONS}
        self._server = Server([SERVICE_NAME], limits=limits, on_invariant=self.break_off)
        transfer_pb2_grpc.add_PrefillServiceServicer_to_server(self._servicer, self._server.grpc)
        address = self._server.listen(self._config.listen)
        engine = self._engine_loop.run(self._servicer.check_integrity)
        self._tasks = [asyncio.create_task(engine, name="engine-loop")]
        await self._server.start()
        await self._server.mark_serving()
        logger.info("service.ready", extra=log_fields(address=address, boot_id=self._offer.boot_id))
        return address

    def remove_files(self) -> None:
        """Remove socket names at once; the process is about to end without stopping."""
        if self._server is not None:
            self._server.remove_sockets()

    async def stop(self) -> None:
        """Refuse what comes, then end streams, engine and server; raises what broke the engine loop."""
        assert self._server is not None
        (engine,) = self._tasks
        self._servicer.shut_down()
        await self._server.shut_down()
        logger.info("service.shutting_down", extra=log_fields(peers=len(self._servicer.peers)))
        if await self._engine_loop.wait_idle(self._config.grace_s):
            await self._servicer.wait_left(LAST_WORDS_S)
        await self._servicer.end_streams(LAST_WORDS_S)
        await self._server.stop(0)
        if not engine.done():
            engine.cancel()
        try:
            await engine
        except asyncio.CancelledError:
            self._journal.service_stopped()
            logger.info("service.stopped", extra=log_fields(peers=len(self._servicer.peers)))
        finally:
            self._record.close()

    def _count_calls(self) -> CallStatistics:
        """Return the counts of the server; asked by calls that it serves."""
        assert self._server is not None
        return self._server.statistics()

    def _make_context(self) -> PeerContext:
        return PeerContext(
            self._offer,
            self._config.slab_folder,
            MappedSlabs(self._config.slab_limits),
            self._queue,
            self._clock,
            self._config.silence_limit_s,
            self._config.credit_wait_s,
            self._journal,
        )


def make_offer(config: PrefillConfig, loaded: Loaded) -> PrefillOffer:
    """Return what this service brings to a session."""
    identity, description = loaded.engine.identity(), loaded.engine.describe()
    return PrefillOffer(
        versions=PROTOCOL_VERSIONS,
        boot_id=new_boot_id(),
        identity=peer_identity(identity, description),
        modes=tuple(TransferMode),
        digests=tuple(DigestKind),
        layouts=(SPAN_LAYOUT,),
        granularity=SpanGranularity(
            description.chunk_tokens or 0,
            config.min_span_bytes,
            config.max_span_bytes,
            description.layer_stops,
        ),
        max_prompt_tokens=description.max_prompt_tokens,
        max_concurrency=config.max_concurrency,
        engine=EngineFacts(description.name, identity.origin, description.widths, description.can_resume),
        longest_step_ms=description.longest_step_ms,
    )
