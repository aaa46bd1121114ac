"""A decode session with a real slab, copies that end when a test says so, and the words of its peer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from common.errors import KVSpanError
from common.kv.spans import SPAN_LAYOUT, Span
from common.session.messages import (
    DecodeMessage,
    PrefillAccepted,
    PrefillCancelled,
    SlabHandle,
    SourceTimings,
    SpanSealed,
    StartPrefill,
)
from common.slab.allocator import Slot
from common.slab.segment import SlabSegment
from common.telemetry.timeline import SpanRecord, Timeline
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation
from decode_service.prefill.importer import Importer, ImportJob
from decode_service.prefill.journaling import DecodeJournal
from decode_service.prefill.peer_session import PeerSession, SessionContext
from decode_service.prefill.remote_prefill import RemotePrefill
from decode_service.request import Request
from tests.support.clock import ManualClock
from tests.support.decoding import make_request
from tests.support.factories import make_geometry, paged
from tests.support.sessions import PROMPT, make_done, make_hello, make_spans, make_welcome

SLAB_BYTES = 65_536
SLOT_BYTES = 8192
REQUEST: Request = replace(make_request(), prompt_ids=PROMPT)
"""Five tokens of the geometry of `make_hello`: six spans."""


class HeldImporter:
    """Keeps every copy until it is told to end it, in order."""

    def __init__(self) -> None:
        self.jobs: list[ImportJob] = []

    def submit(self, job: ImportJob) -> None:
        """See `Importer`."""
        self.jobs.append(job)

    def finish(self, count: int | None = None) -> None:
        """End the oldest copies well; all when no number is given."""
        for _ in range(len(self.jobs) if count is None else count):
            job, span = self.jobs[0], self.jobs[0].span
            self._end(SpanRecord(span.sequence, span.length, span.written_ns, span.sealed_ns, 40, 70), job)

    def fail(self, error: KVSpanError) -> None:
        """End the oldest copy badly."""
        self._end(error, self.jobs[0])

    def _end(self, outcome: SpanRecord | KVSpanError, job: ImportJob) -> None:
        self.jobs.remove(job)
        job.source.release()
        job.done(outcome)


@dataclass(slots=True)
class Transfer:
    """One transfer, what it holds, and what came back."""

    prefill: RemotePrefill
    start: StartPrefill
    reservation: Reservation
    timeline: Timeline
    freed: list[Reservation]

    @property
    def is_free(self) -> bool:
        """Whether the pages came back, once."""
        assert len(self.freed) < 2
        return bool(self.freed)

    @property
    def spans(self) -> list[Span]:
        """All spans of it."""
        return make_spans(self.start)


@dataclass(slots=True)
class SessionDesk:
    """A session, and the peer's side of it by hand."""

    slab: SlabSegment
    importer: HeldImporter
    clock: ManualClock
    journal: DecodeJournal = field(default_factory=DecodeJournal)
    session: PeerSession = field(init=False)
    num_changes: int = 0

    def note_change(self) -> None:
        """Something opened, came back or went away."""
        self.num_changes += 1

    @property
    def num_slots(self) -> int:
        """Slots that are leased."""
        return self.session.slots.statistics().num_leased

    @property
    def num_mappings(self) -> int:
        """How often this process maps the slab."""
        return sum(self.slab.name in line for line in Path("/proc/self/maps").read_text().splitlines())

    async def open(self, longest_step_ms: int = 0) -> None:
        """Say Hello and be welcomed."""
        self.session.greet()
        await self.session.next_message()
        welcome = replace(make_welcome(), nonce=self.slab.nonce, longest_step_ms=longest_step_ms)
        self.session.receive(welcome)

    async def said(self, count: int = 1) -> list[DecodeMessage | None]:
        """Return the next messages to the peer."""
        return [await self.session.next_message() for _ in range(count)]

    def reserve(self) -> tuple[Reservation, list[Reservation]]:
        """Return pages that the client holds, and the list they are put on when they come back."""
        freed: list[Reservation] = []

        def on_free(reservation: Reservation) -> None:
            self.journal.reservation_freed(reservation)
            freed.append(reservation)

        pages = KVCache(paged(make_geometry()), (9,)).reserve(REQUEST.prompt_len, 4)
        reservation = Reservation(pages, on_free)
        self.journal.reservation_made(reservation)
        return reservation, freed

    async def begin(self, waited_s: int = 0) -> Transfer:
        """Start a transfer in pages and a slot of its own, of a request that has waited for them."""
        slot: Slot = self.session.slots.lease(SLOT_BYTES)
        reservation, freed = self.reserve()
        timeline = Timeline(self.clock.now_ns())
        self.clock.advance_s(waited_s)
        prefill = self.session.transfers.begin(REQUEST, reservation, slot, timeline)
        (start,) = await self.said()
        assert isinstance(start, StartPrefill)
        return Transfer(prefill, start, reservation, timeline, freed)

    def accept(self, transfer: Transfer) -> None:
        """Queue it at the peer."""
        self.session.receive(PrefillAccepted(transfer.start.transfer_id, 1, 0))

    def tell(self, transfer: Transfer, spans: Sequence[Span] | None = None) -> None:
        """Tell spans; all when none are given."""
        now_ns = self.clock.now_ns()
        for span in transfer.spans if spans is None else spans:
            self.session.receive(SpanSealed(replace(span, written_ns=now_ns, sealed_ns=now_ns)))

    def end(self, transfer: Transfer, timings: SourceTimings | None = None) -> None:
        """Say Done, of an engine that took no time unless these are given."""
        now_ns = self.clock.now_ns()
        done = make_done(transfer.start, transfer.spans)
        self.session.receive(replace(done, timings=timings or SourceTimings(now_ns, now_ns, now_ns)))

    def cancelled(self, transfer: Transfer) -> None:
        """Say Cancelled: the engine writes no more."""
        self.session.receive(PrefillCancelled(transfer.start.transfer_id, 1))


@contextmanager
def make_session_desk(slab_dir: Path) -> Iterator[SessionDesk]:
    """Yield a session that has said nothing; the slab is closed at the end, if the session has not."""
    with SlabSegment.create(slab_dir, SLAB_BYTES, "decode-boot") as slab:
        importer = HeldImporter()
        desk = SessionDesk(slab, importer, ManualClock(5_000))
        context = SessionContext(
            importer=cast("Importer", importer),
            on_change=desk.note_change,
            clock=desk.clock,
            journal=desk.journal,
        )
        hello = replace(make_hello(), slab=SlabHandle(slab.name, slab.size_bytes, SPAN_LAYOUT))
        desk.session = PeerSession(hello, slab, context)
        yield desk


def leave(transfer: Transfer) -> None:
    """The client lets go of the pages."""
    transfer.reservation.drop(Holder.CLIENT)


async def requested(desk: SessionDesk) -> Transfer:
    """A transfer that was sent."""
    return await desk.begin()


async def streaming(desk: SessionDesk) -> Transfer:
    """A transfer with two copies under way."""
    transfer = await desk.begin()
    desk.accept(transfer)
    desk.tell(transfer, transfer.spans[:2])
    return transfer


async def ending(desk: SessionDesk) -> Transfer:
    """A transfer whose producer is done and whose last copy is under way."""
    transfer = await desk.begin()
    desk.accept(transfer)
    desk.tell(transfer)
    desk.importer.finish(5)
    desk.end(transfer)
    return transfer


async def complete(desk: SessionDesk) -> Transfer:
    """A transfer that waits for its publication."""
    transfer = await ending(desk)
    desk.importer.finish()
    return transfer


Making = Callable[[SessionDesk], Awaitable[Transfer]]
STATES: tuple[Making, ...] = (requested, streaming, ending, complete)
