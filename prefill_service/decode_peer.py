"""One decode service as the prefill service sees it: carries out what the session machine decides.

Theory of operation: messages in, actions out, one stream. Everything here runs on the event loop but
`_seal_from_engine`, which the engine's thread calls. The peer outlives its stream by as long as the engine
still writes into its slab: the memory is unmapped on `SlabIdle`, never earlier (rule 4).

Ownership: made by the servicer per stream; owns the mapping of the slab, its jobs and the queue of messages
to send. Not here: how long jobs may take, whose turn comes when (`peer_jobs.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common.errors import InvariantViolation, KVSpanError, LeaseExpired
from common.excerpt import printable
from common.kv.spans import Span
from common.runtime.clock import Clock
from common.runtime.tasks import make_in_thread
from common.session.actions import (
    AttachSlab,
    Dequeue,
    Enqueue,
    PrefillAction,
    ReturnCredit,
    Send,
    SlabIdle,
    StopEngine,
)
from common.session.messages import DecodeMessage, PrefillMessage, SlabHandle, StartPrefill
from common.session.negotiation import PrefillOffer
from common.session.prefill_side import PrefillSession, PrefillSessionStatistics
from common.session.prefill_states import WELCOMED, PrefillState
from common.slab.header import HEADER_BYTES
from common.slab.mapped import MappedSlabs
from common.slab.segment import SlabSegment
from common.telemetry.logging import log_fields
from prefill_service.job import Job, JobResult
from prefill_service.journaling import PrefillJournal
from prefill_service.peer_jobs import PeerJobs
from prefill_service.queue import JobQueue
from prefill_service.span_writer import SlotTarget
from prefill_service.totals import Totals
from prefill_service.transfer_log import TransferLog

logger = logging.getLogger(__name__)


MAX_UNSAID = 1000
"""Messages that may wait for a peer before nothing more is read of it, so that questions cost no memory."""


@dataclass(frozen=True, slots=True)
class PeerContext:
    """What every peer shares."""

    offer: PrefillOffer
    slab_dir: Path
    slabs: MappedSlabs
    """Of all peers."""

    queue: JobQueue[Job]
    clock: Clock
    silence_limit_s: float
    credit_wait_s: float
    journal: PrefillJournal = field(default_factory=PrefillJournal)
    totals: Totals = field(default_factory=Totals)


class DecodePeer:
    """Adapter between one stream, the session machine, the slab and the engine; owner of its jobs."""

    def __init__(self, number: int, context: PeerContext, on_idle: Callable[[DecodePeer], object]) -> None:
        """Wait for Hello; `on_idle` is called once, when nothing of the peer is left."""
        self._number = number
        self._context = context
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._session = PrefillSession(context.offer, HEADER_BYTES)
        self._journal = context.journal.peer()
        self._log = TransferLog(number, context.totals)
        self._slab: SlabSegment | None = None
        self._to_map: SlabHandle | None = None
        self._jobs = PeerJobs(context.queue, self._expire)
        # Invariant: holds the jobs that the machine counts as live.
        self._outgoing: asyncio.Queue[PrefillMessage | None] = asyncio.Queue()
        # Invariant: at most MAX_UNSAID answers wait, beside the spans and ends of live jobs.
        self._was_taken = asyncio.Event()

    @property
    def is_mapping(self) -> bool:
        """Whether the session waits for its slab to be mapped, and hears nobody meanwhile."""
        return self._session.state is PrefillState.ATTACHING

    @property
    def number(self) -> int:
        """Names the session inside this process."""
        return self._number

    def statistics(self) -> PrefillSessionStatistics:
        """Return the counts of the session now."""
        return self._session.statistics()

    @property
    def num_unanswered(self) -> int:
        """Transfers that were accepted, and whose end the peer will hear."""
        return self._log.num_live

    @property
    def slab_bytes(self) -> int:
        """Length of the slab; 0 while none is mapped."""
        return 0 if self._slab is None else self._slab.size_bytes

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when session, jobs, log and rings do not agree."""
        self._session.check_integrity()
        num_jobs = self._session.statistics().num_jobs
        self._jobs.check_integrity(num_jobs)
        num_heard = 0 if self._session.state is PrefillState.CLOSED else num_jobs
        if self.num_unanswered != num_heard:
            raise InvariantViolation(f"{num_heard} jobs to be answered, {self.num_unanswered} in the log")

    async def wait_heard(self) -> None:
        """Wait until the peer has taken enough of what was said; one that does not read is not heard."""
        while self._outgoing.qsize() > MAX_UNSAID:
            self._was_taken.clear()
            await self._was_taken.wait()

    def receive(self, message: DecodeMessage) -> None:
        """Take one message of the stream; raises what the machine raises. `map_slab` comes next."""
        self._journal.received(message)
        self._log.received(message)
        self._carry_out(self._session.receive(message))

    async def map_slab(self) -> None:
        """Map the slab that was named and answer, beside the event loop; nothing when none waits for it.

        Raises: `SlabNotShared`.
        """
        handle, self._to_map = self._to_map, None
        if handle is None:
            return
        slab_dir, slabs = self._context.slab_dir, self._context.slabs
        attach = partial(SlabSegment.attach, slab_dir, handle.name, handle.size_bytes, slabs)
        slab = await make_in_thread(attach, SlabSegment.close)
        # The stream ended while the thread mapped: nobody else knows of this mapping.
        if not self.is_mapping:
            slab.close()
            return
        self._slab = slab
        self._carry_out(self._session.attached(slab.nonce))
        self._context.totals.sessions_opened += 1
        boot_id = printable(self.statistics().peer_boot_id)
        fields = log_fields(session=self._number, slab=handle.name, peer_boot_id=boot_id)
        logger.info("session.opened", extra=fields)

    async def next_message(self) -> PrefillMessage | None:
        """Wait for the next message to send; None when the stream is to end."""
        message = await self._outgoing.get()
        self._was_taken.set()
        return message

    def leave(self) -> None:
        """Refuse what is started from now on, and say so."""
        self._carry_out(self._session.leave())

    def end_stream(self) -> None:
        """Let the stream end once everything is said that waits to be said."""
        self._outgoing.put_nowait(None)

    def close(self) -> None:
        """The stream has ended; running jobs are stopped, the slab goes when they have ended. Idempotent."""
        if self._session.state is PrefillState.CLOSED:
            return
        self._journal.closed()
        self._log.closed()
        self._context.totals.sessions_ended += self._session.state in WELCOMED
        logger.info("session.closed", extra=log_fields(session=self._number))
        self._outgoing.put_nowait(None)
        self._carry_out(self._session.close())

    def start(self, job: Job) -> bool:
        """Tell whether a job taken from the queue still wants to run."""
        transfer_id = job.target.start.transfer_id
        if not self._session.engine_started(transfer_id):
            return False
        self._log.started(transfer_id, self._context.clock.now_ns() - job.accepted_ns)
        return True

    def finish(self, job: Job, outcome: JobResult | KVSpanError) -> None:
        """A started job has ended, well or badly, and writes no more."""
        transfer_id = job.target.start.transfer_id
        self._journal.drained(transfer_id)
        self._jobs.ended(job, outcome)
        if isinstance(outcome, JobResult):
            timings = outcome.timings
            actions = self._session.engine_finished(transfer_id, outcome.totals, outcome.logits, timings)
        else:
            actions = self._session.engine_failed(transfer_id, outcome)
        self._carry_out(actions)

    def _seal_from_engine(self, span: Span) -> None:
        """Hand a final span to the event loop; on the engine's thread."""
        self._loop.call_soon_threadsafe(self._seal, span)

    def _seal(self, span: Span) -> None:
        self._carry_out(self._session.span_written(span))

    def _carry_out(self, actions: Iterable[PrefillAction]) -> None:
        for action in actions:
            # Written down first: no message leaves before the journal has its line.
            self._journal.acted(action)
            self._log.acted(action)
            match action:
                case Send(message):
                    self._outgoing.put_nowait(message)  # type: ignore[arg-type]
                case AttachSlab(handle):
                    self._to_map = handle
                case Enqueue(start):
                    self._enqueue(start)
                case Dequeue(transfer_id):
                    self._journal.drained(transfer_id)
                    self._jobs.withdraw(transfer_id)
                case StopEngine(transfer_id):
                    self._jobs.of(transfer_id).give_up()
                case ReturnCredit(transfer_id, sequence):
                    self._jobs.of(transfer_id).return_credit(sequence)
                case SlabIdle():
                    self._release_slab()

    def _enqueue(self, start: StartPrefill) -> None:
        assert self._slab is not None
        memory = self._slab.view(start.slot_offset, start.slot_size)
        session, produced = self._session, self._context.offer.identity.geometry.dtypes
        target = SlotTarget(
            start, session.geometry, produced, memory, session.agreement.digest, self._seal_from_engine
        )
        self._jobs.add(Job(self, target, self._context.clock.now_ns(), self._context.credit_wait_s))

    def _expire(self, transfer_id: int, error: LeaseExpired) -> None:
        self._carry_out(self._session.expire(transfer_id, error))

    def _release_slab(self) -> None:
        if self._slab is not None:
            self._slab.close()
            self._slab = None
        self._context.queue.forget(self._number)
        self._context.totals.ignored += self.statistics().ignored
        self._on_idle(self)
