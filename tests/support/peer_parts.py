"""The parties around two session machines that move bytes: an engine, pages, and what is held of a transfer.

Theory of operation: every cell (one row of one layer, position and kind) of a transfer has its own bytes,
so that a byte in the wrong place never passes. The engine writes a span in two halves; what it may touch
is asked of its owner before each.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import Cancelled, EngineFailed, KVSpanError, LeaseExpired
from common.kv.coverage import Coverage
from common.kv.digest import DigestKind, digest
from common.kv.plan import PlannedSpan, SpanGranularity, SpanPlan, plan_spans
from common.kv.ranges import Range
from common.kv.ring import ring_shares
from common.kv.spans import Span, key_range, value_range
from common.session.actions import PrefillAction
from common.session.messages import StartPrefill, TransferMode
from common.session.prefill_side import PrefillSession
from common.slab.allocator import Slot, SlotAllocator
from prefill_service.credit import CreditRing, CreditTerms
from tests.support.clock import ManualClock
from tests.support.factories import make_hybrid_geometry
from tests.support.sessions import TIMINGS, make_logits, make_totals

GEOMETRY = make_hybrid_geometry(windows=(3, None, 3), num_kv_heads=1, head_dim=4, full_head_dim=8)
GROUPS = GEOMETRY.groups
GRANULARITY = SpanGranularity(chunk_tokens=4, min_span_bytes=0, max_span_bytes=128)
DIGEST = DigestKind.XXH3_64
PAD = 0x5A
"""What an engine leaves between parts."""

Cell = tuple[int, int, int, bool]
"""Group, group layer, position, whether it is a value."""


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of a span: where it lies in the span, and which it is."""

    source: Range
    cell: Cell


def rows(span: Span | PlannedSpan) -> list[Row]:
    """Return the cells of a span."""
    group = GROUPS[span.group_index]
    found = []
    for number, layer in enumerate(span.layers):
        for is_value, part in enumerate((key_range, value_range)):
            start = part(group, len(span.tokens), number).start
            for index, token in enumerate(span.tokens):
                first = start + index * group.row_bytes
                source = Range(first, first + group.row_bytes)
                found.append(Row(source, (span.group_index, layer, token, bool(is_value))))
    return found


def cell_bytes(owner: str, cell: Cell) -> bytes:
    """Return what the model computes for a cell of a transfer."""
    size = GROUPS[cell[0]].row_bytes
    return hashlib.blake2b(f"{owner}/{cell}".encode(), digest_size=size).digest()


def payload(owner: str, span: Span | PlannedSpan) -> bytes:
    """Return all bytes of a span, pads included."""
    filled = bytearray([PAD]) * span.length
    for row in rows(span):
        filled[row.source.start : row.source.stop] = cell_bytes(owner, row.cell)
    return bytes(filled)


class PageStore:
    """Pages of a decode service: leased to one transfer each, compared once published."""

    def __init__(self, size: int) -> None:
        self._memory = bytearray(size)
        self._allocator = SlotAllocator(Range(0, size), alignment=64)
        self._leased: dict[int, Slot] = {}
        self._published: list[tuple[Slot, bytes]] = []

    def reserve(self, size: int) -> Slot | None:
        """Lease pages; nothing when the store is full."""
        if not self._allocator.can_lease(size):
            return None
        lease = self._allocator.lease(size)
        self._leased[lease.slot_id] = lease
        return lease

    def write(self, lease: Slot, offset: int, content: bytes) -> None:
        """Write into leased pages; a write after the release is the fault these tests look for."""
        assert self._leased.get(lease.slot_id) == lease, f"write into {lease}, which is not leased"
        start = lease.offset + offset
        self._memory[start : start + len(content)] = content

    def release(self, lease: Slot) -> None:
        """Give pages back."""
        del self._leased[lease.slot_id]
        self._allocator.release(lease)

    def publish(self, lease: Slot, expected: bytes) -> None:
        """Make pages readable; they must hold exactly what the engine made."""
        self._published.append((lease, expected))
        self.check()

    def retire(self) -> bool:
        """End the oldest sequence and free its pages."""
        if not self._published:
            return False
        lease, _ = self._published.pop(0)
        self.release(lease)
        return True

    @property
    def num_leased(self) -> int:
        """Return how many leases are neither published nor released."""
        return len(self._leased) - len(self._published)

    def check(self) -> None:
        """Compare every published reservation with what the engine made."""
        self._allocator.check_integrity()
        for lease, expected in self._published:
            found = self._memory[lease.offset : lease.offset + len(expected)]
            assert found == expected, f"published pages {lease} have changed"


@dataclass(slots=True)
class _Run:
    start: StartPrefill
    planned: deque[PlannedSpan]
    ring: CreditRing | None
    """None when the slot holds everything."""

    stop: threading.Event
    writing: tuple[PlannedSpan, Span, bytes] | None = None
    made: list[Span] = field(default_factory=list)

    @property
    def tells_at_once(self) -> bool:
        """Whether a span is sealed before the end."""
        return self.start.mode is TransferMode.STREAM or self.ring is not None


class FakeEngine:
    """The engine thread of a prefill service; each call is one step of it."""

    def __init__(
        self, name: str, slab: bytearray, session: PrefillSession, check_write: Callable[[StartPrefill], None]
    ) -> None:
        self._name = name
        self._slab = slab
        self._session = session
        self._check_write = check_write
        self._queue: deque[StartPrefill] = deque()
        self._run: _Run | None = None

    def enqueue(self, start: StartPrefill) -> None:
        """Put a job last."""
        self._queue.append(start)

    def dequeue(self, transfer_id: int) -> None:
        """Take a job out of the queue; it must be there."""
        kept = [start for start in self._queue if start.transfer_id != transfer_id]
        assert len(kept) == len(self._queue) - 1
        self._queue = deque(kept)

    def stop(self, transfer_id: int) -> None:
        """Ask for the end of the running job."""
        assert self._run is not None
        assert self._run.start.transfer_id == transfer_id
        self._run.stop.set()

    def release(self, transfer_id: int, sequence: int) -> None:
        """Take credit for a span of the running job."""
        assert self._run is not None
        assert self._run.start.transfer_id == transfer_id
        if self._run.ring is not None:
            self._run.ring.release(sequence)
            self._run.ring.check_integrity()

    @property
    def running(self) -> int | None:
        """Return the transfer that may be written for now."""
        return None if self._run is None else self._run.start.transfer_id

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing runs and nothing waits."""
        return self._run is None and not self._queue

    def step(self, notices_stop: bool) -> tuple[PrefillAction, ...] | None:
        """Do the next thing; nothing when there is none or credit is missing."""
        run = self._run
        if run is None:
            return self._take()
        if run.stop.is_set() and notices_stop:
            return self.fail()
        if run.writing is not None:
            return self._write_second_half(run)
        if run.planned:
            return self._write_first_half(run)
        return self._finish(run)

    def fail(self) -> tuple[PrefillAction, ...] | None:
        """Break down in the running job."""
        if self._run is None:
            return None
        transfer_id, was_stopped = self._run.start.transfer_id, self._run.stop.is_set()
        self._run = None
        error = Cancelled("stopped") if was_stopped else EngineFailed("a device was lost")
        return self._session.engine_failed(transfer_id, error)

    def _take(self) -> tuple[PrefillAction, ...] | None:
        if not self._queue:
            return None
        start = self._queue.popleft()
        if self._session.engine_started(start.transfer_id):
            plan = plan_spans(GEOMETRY, start.required, GRANULARITY)
            stop = threading.Event()
            self._run = _Run(start, deque(plan), _make_ring(plan, start, stop), stop)
        return ()

    def _write_first_half(self, run: _Run) -> tuple[PrefillAction, ...] | None:
        planned = run.planned[0]
        try:
            offset = planned.offset if run.ring is None else run.ring.open(planned)
        except (LeaseExpired, Cancelled):
            return None
        run.planned.popleft()
        content = payload(f"{self._name}/{run.start.transfer_id}", planned)
        span = Span(
            transfer_id=run.start.transfer_id,
            attempt=run.start.attempt,
            slot_id=run.start.slot_id,
            generation=run.start.generation,
            sequence=len(run.made),
            group_index=planned.group_index,
            layers=planned.layers,
            tokens=planned.tokens,
            offset=run.start.slot_offset + offset,
            length=planned.length,
            digest=digest(DIGEST, content),
            written_ns=len(run.made),
            sealed_ns=len(run.made),
        )
        run.writing = (planned, span, content)
        self._write(run, span.offset, content[: span.length // 2])
        return ()

    def _write_second_half(self, run: _Run) -> tuple[PrefillAction, ...]:
        assert run.writing is not None
        planned, span, content = run.writing
        half = span.length // 2
        self._write(run, span.offset + half, content[half:])
        run.made.append(span)
        run.writing = None
        if run.ring is not None:
            run.ring.sealed(span.sequence, planned)
        return self._session.span_written(span) if run.tells_at_once else ()

    def _write(self, run: _Run, offset: int, content: bytes) -> None:
        self._check_write(run.start)
        self._slab[offset : offset + len(content)] = content

    def _finish(self, run: _Run) -> tuple[PrefillAction, ...]:
        self._run = None
        untold = [] if run.tells_at_once else run.made
        sealed = [action for span in untold for action in self._session.span_written(span)]
        totals = make_totals(run.made, len(GROUPS))
        end = self._session.engine_finished(run.start.transfer_id, totals, make_logits(), TIMINGS)
        return (*sealed, *end)


def _make_ring(plan: SpanPlan, start: StartPrefill, stop: threading.Event) -> CreditRing | None:
    """Return the ring of a slot that does not hold everything; it never waits, so that a step ends."""
    if plan.total_bytes <= start.slot_size:
        return None
    return CreditRing(ring_shares(plan, start.slot_size), CreditTerms(0, stop, ManualClock()))


@dataclass(frozen=True, slots=True)
class Wish:
    """What a test asks a transfer to be."""

    prompt_len: int
    first_token: int
    mode: TransferMode
    is_tight: bool
    """Whether the slot holds only the largest span of each group, so that credit is needed; not DEFERRED."""


@dataclass(slots=True)
class TransferRecord:
    """What the decode service holds for one transfer, and what its session said of it."""

    start: StartPrefill
    slot: Slot
    pages: Slot
    offsets: dict[Cell, int]
    """Where each required cell lies in the pages."""

    coverage: Coverage
    has_accepted_end: bool = False
    """Whether the session accepted its Done: then only this side can fail it."""

    is_complete: bool = False
    is_published: bool = False
    is_drained: bool = False
    error: KVSpanError | None = None


@dataclass(slots=True)
class Import:
    """One copy of the importer; half done once `has_begun`."""

    span: Span
    staged: bytearray = field(default_factory=bytearray)
    has_begun: bool = False


def place_cells(wish: Wish) -> tuple[dict[Cell, int], int]:
    """Return where each cell that a transfer requires lies in its pages, and the bytes of all."""
    offsets: dict[Cell, int] = {}
    size = 0
    for group, tokens in zip(GROUPS, GEOMETRY.required(wish.first_token, wish.prompt_len), strict=True):
        for layer in range(group.num_layers):
            for cell in ((group.group_index, layer, t, v) for t in tokens for v in (False, True)):
                offsets[cell] = size
                size += group.row_bytes
    return offsets, size
