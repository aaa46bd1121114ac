"""Two session machines joined by an in-memory stream, with real bytes and every thread as a step.

Theory of operation: a `SessionPair` owns one slab, one `DecodeSession` with its importer, one
`PrefillSession` with its engine, and a queue of messages per direction. Nothing happens by itself: each
method is one step of one party, so that a test chooses the order. Engine and importer work in halves, so
that a cancel can fall in the middle of a copy. The rules of drain and publication are asserted where the
actions of the machines are carried out.

Ownership: pages belong to a `PageStore`, which outlives its sessions as the cache of a decode service does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from common.errors import Cancelled, ChecksumMismatch, EngineFailed, KVSpanError, LeaseExpired, PeerLost
from common.kv.coverage import Coverage
from common.kv.digest import digest
from common.kv.ranges import Range
from common.kv.ring import minimum_ring
from common.session.actions import (
    AttachSlab,
    DecodeAction,
    Dequeue,
    Enqueue,
    HalfClose,
    ImportSpan,
    PrefillAction,
    ReturnCredit,
    Send,
    SessionLeaving,
    SessionOpened,
    SlabIdle,
    StopEngine,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.decode_side import WELCOMED, DecodeSession, SessionState
from common.session.identity import Numerics
from common.session.messages import DecodeMessage, PrefillDone, PrefillMessage, StartPrefill
from common.session.prefill_side import PrefillSession
from common.session.prefill_states import PrefillState
from common.session.transfer_states import END_ACCEPTED
from common.slab.allocator import SlotAllocator
from tests.support.factories import plan_of, starts_of
from tests.support.peer_parts import (
    DIGEST,
    GEOMETRY,
    GRANULARITY,
    GROUPS,
    FakeEngine,
    Import,
    PageStore,
    TransferRecord,
    Wish,
    cell_bytes,
    place_cells,
    rows,
)
from tests.support.sessions import NONCE, make_hello, make_identity, make_offer

SLAB_BYTES = 1_600
"""One long prompt and a half, so that slots are reused all the time."""

OURS = (Cancelled, ChecksumMismatch, EngineFailed)
"""Failures that happen on this side: a client that goes, bytes that do not match, a copy that breaks."""


class SessionPair:
    """One session, both ends of it, and the bytes between them."""

    def __init__(self, name: str, pages: PageStore) -> None:
        self.name = name
        self.to_prefill: deque[DecodeMessage] = deque()
        self.to_decode: deque[PrefillMessage] = deque()
        self.history: list[DecodeMessage | PrefillMessage] = []
        self.records: dict[int, TransferRecord] = {}
        self.imports: list[Import] = []
        self.num_idle = {"decode": 0, "prefill": 0}
        self.has_left = False
        self._pages = pages
        self._slab = bytearray(SLAB_BYTES)
        self._allocator = SlotAllocator(Range(64, SLAB_BYTES), alignment=64)
        numerics = Numerics("pattern", GRANULARITY.chunk_tokens)
        identity = replace(make_identity(GEOMETRY), numerics=numerics)
        hello = make_hello(identity)
        hello = replace(hello, slab=replace(hello.slab, size_bytes=SLAB_BYTES))
        self.decode = DecodeSession(hello, NONCE)
        self.prefill = PrefillSession(replace(make_offer(identity), granularity=GRANULARITY))
        self.engine = FakeEngine(name, self._slab, self.prefill, self._check_engine_write)
        self._carry_out_decode(self.decode.greet())

    def start(self, wish: Wish) -> bool:
        """Reserve pages and slot, then start a transfer; nothing when something is full."""
        cells = place_cells(wish)
        plan = plan_of(GEOMETRY, wish.first_token, wish.prompt_len, GRANULARITY)
        slot_bytes = minimum_ring(plan) if wish.is_tight else plan.total_bytes
        is_full = self.decode.statistics().num_transfers == 3
        if self.decode.state is not SessionState.OPEN or is_full or not self._allocator.can_lease(slot_bytes):
            return False
        pages = self._pages.reserve(cells[1])
        if pages is None:
            return False
        slot = self._allocator.lease(slot_bytes)
        transfer_id = len(self.records) + 1
        start = StartPrefill(
            transfer_id=transfer_id,
            attempt=1,
            slot_id=slot.slot_id,
            generation=slot.generation,
            slot_offset=slot.offset,
            slot_size=slot.size,
            token_ids=tuple(range(wish.prompt_len)),
            first_tokens=starts_of(GEOMETRY, wish.first_token, wish.prompt_len),
            mode=wish.mode,
            time_limit_s=30.0,
            request_id="same for all",
        )
        coverage = Coverage(GROUPS, GEOMETRY.required(wish.first_token, wish.prompt_len), slot.extent)
        self.records[transfer_id] = TransferRecord(start, slot, pages, cells[0], coverage)
        self._carry_out_decode(self.decode.begin(start, coverage))
        return True

    def cancel(self, transfer_id: int) -> None:
        """The client goes."""
        self._carry_out_decode(self.decode.abort(transfer_id, Cancelled("by the client")))

    def begin_import(self, index: int) -> bool:
        """Copy the first half of a span."""
        waiting = [one for one in self.imports if not one.has_begun]
        if not waiting:
            return False
        one = waiting[index % len(waiting)]
        one.has_begun = True
        self._copy(one, Range(0, one.span.length // 2))
        return True

    def end_import(self, index: int, error: KVSpanError | None = None) -> bool:
        """Copy the second half of a span, check its digest, and report."""
        begun = [one for one in self.imports if one.has_begun]
        if not begun:
            return False
        one = begun[index % len(begun)]
        span = one.span
        self._copy(one, Range(span.length // 2, span.length))
        self.imports.remove(one)
        actual = digest(DIGEST, one.staged)
        if error is None and actual != span.digest:
            error = ChecksumMismatch(span.sequence, span.digest.hex(), actual.hex())
        key = (span.transfer_id, span.sequence)
        ended = self.decode.import_failed(*key, error) if error else self.decode.import_finished(*key)
        self._carry_out_decode(ended)
        return True

    def publish(self) -> bool:
        """Publish the first complete transfer, comparing its pages with what the engine made."""
        ready = [
            record
            for record in self.records.values()
            if record.is_complete and record.error is None and not record.is_published
        ]
        if not ready:
            return False
        record = ready[0]
        record.is_published = True
        owner = f"{self.name}/{record.start.transfer_id}"
        self._pages.publish(record.pages, b"".join(cell_bytes(owner, cell) for cell in record.offsets))
        self._carry_out_decode(self.decode.published(record.start.transfer_id))
        return True

    def close_decode(self) -> None:
        """Decode learns that the stream is gone."""
        self._carry_out_decode(self.decode.close(PeerLost("stream broke")))

    def deliver_to_decode(self) -> bool:
        """Hand decode its next message."""
        if not self.to_decode:
            return False
        message = self.to_decode.popleft()
        self._carry_out_decode(self.decode.receive(message))
        if isinstance(message, PrefillDone):
            for record in self.records.values():
                if not record.is_drained:
                    state = self.decode.transfer(record.start.transfer_id).state
                    record.has_accepted_end |= state in END_ACCEPTED
        return True

    def deliver_to_prefill(self) -> bool:
        """Hand prefill its next message."""
        if not self.to_prefill:
            return False
        self._carry_out_prefill(self.prefill.receive(self.to_prefill.popleft()))
        return True

    def step_engine(self, notices_stop: bool = True) -> bool:
        """Let the engine do its next thing."""
        return self._engine_did(self.engine.step(notices_stop))

    def fail_engine(self) -> bool:
        """Let the engine break down in its job."""
        return self._engine_did(self.engine.fail())

    def expire(self, transfer_id: int) -> None:
        """The time limit of a job passes at prefill."""
        self._carry_out_prefill(self.prefill.expire(transfer_id, LeaseExpired("too slow")))

    def shut_prefill_down(self) -> None:
        """Prefill is told to end."""
        self._carry_out_prefill(self.prefill.leave())

    def close_prefill(self) -> None:
        """Prefill learns that the stream is gone."""
        self._carry_out_prefill(self.prefill.close())

    def advance(self, publishes: bool = True) -> bool:
        """Let every party take one step; tell whether anything happened."""
        did = [self.deliver_to_prefill(), self.deliver_to_decode(), self.step_engine()]
        did += [self.end_import(0), self.begin_import(0), publishes and self.publish()]
        return any(did)

    def settle(self) -> None:
        """Go on until nothing is left to do; a stream that broke for one side breaks for the other."""
        if self.is_broken:
            self.close_decode()
            self.close_prefill()
        while self.advance():
            pass
        if self.has_left:  # prefill ends the stream upon the half-close
            self.close_prefill()
            self.close_decode()

    @property
    def is_broken(self) -> bool:
        """Tell whether a side has closed."""
        return self.decode.state is SessionState.CLOSED or self.prefill.state is PrefillState.CLOSED

    def check(self) -> None:
        """Check both machines, and what they say against what is held."""
        self.decode.check_integrity()
        self.prefill.check_integrity()
        self._allocator.check_integrity()
        self._pages.check()
        live = [record for record in self.records.values() if not record.is_drained]
        assert self.decode.statistics().num_transfers == len(live)
        assert self._allocator.statistics().num_leased == len(live)
        for record in live:
            record.coverage.check_integrity()

    def check_settled(self) -> None:
        """Check that nothing is held, and that every transfer had exactly one outcome."""
        assert self.decode.statistics().num_transfers == 0
        assert self.prefill.statistics().num_jobs == 0
        assert self.prefill.statistics().pinned_bytes == 0
        assert self.engine.is_idle
        assert not self.imports
        for record in self.records.values():
            assert record.is_drained
            assert record.is_published != (record.error is not None)
        assert set(self.num_idle.values()) == {1 if self.is_broken else 0}

    def _check_engine_write(self, start: StartPrefill) -> None:
        """Rule 4: what an engine writes into is its own until it said that it has ended."""
        assert self.num_idle["prefill"] == 0, "the slab is unmapped under its writer"
        if self.decode.state is not SessionState.CLOSED:
            record = self.records[start.transfer_id]
            assert not record.is_drained, f"transfer {start.transfer_id} was drained under its writer"

    def _copy(self, one: Import, half: Range) -> None:
        """Rule 4: what a copy reads and writes is its own until it has ended."""
        record = self.records[one.span.transfer_id]
        assert self.num_idle["decode"] == 0, "the slab is unmapped under its reader"
        assert not record.is_drained
        assert not record.is_published
        one.staged += self._slab[one.span.offset + half.start : one.span.offset + half.stop]
        for row in rows(one.span):
            if half.start < row.source.stop <= half.stop:
                content = bytes(one.staged[row.source.start : row.source.stop])
                self._pages.write(record.pages, record.offsets[row.cell], content)

    def _carry_out_decode(self, actions: tuple[DecodeAction, ...]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    assert self.decode.state is not SessionState.CLOSED
                    assert not self.has_left, "a word after the last one"
                    self.history.append(message)
                    self.to_prefill.append(message)  # type: ignore[arg-type]
                case ImportSpan(span):
                    self.imports.append(Import(span))
                case TransferComplete(transfer_id):
                    self._completed(self.records[transfer_id])
                case TransferFailed(transfer_id, error):
                    self._failed(self.records[transfer_id], error)
                case TransferDrained(transfer_id):
                    self._drained(self.records[transfer_id])
                case SlabIdle():
                    assert not self.imports
                    self.num_idle["decode"] += 1
                case SessionOpened() | SessionLeaving():
                    assert self.decode.state in WELCOMED
                case HalfClose():
                    assert not self.has_left, "left twice"
                    self.has_left = True

    def _completed(self, record: TransferRecord) -> None:
        assert not record.is_complete, "complete twice"
        assert record.error is None, "complete after a failure"
        assert record.coverage.is_complete
        assert not self._is_copied(record)
        record.is_complete = True

    def _failed(self, record: TransferRecord, error: KVSpanError) -> None:
        assert record.error is None, "failed twice"
        assert not record.is_published, "failed after publication"
        assert not record.has_accepted_end or isinstance(error, OURS), "failed by the peer after its end"
        record.error = error

    def _drained(self, record: TransferRecord) -> None:
        assert not record.is_drained, "drained twice"
        assert record.is_published or record.error is not None
        assert not self._is_copied(record), "drained under a copy"
        is_written = self.engine.running == record.start.transfer_id
        assert not is_written or self.decode.state is SessionState.CLOSED, "drained under its writer"
        record.is_drained = True
        self._allocator.release(record.slot)
        if not record.is_published:
            self._pages.release(record.pages)

    def _is_copied(self, record: TransferRecord) -> bool:
        return any(one.span.transfer_id == record.start.transfer_id for one in self.imports)

    def _engine_did(self, actions: tuple[PrefillAction, ...] | None) -> bool:
        self._carry_out_prefill(actions or ())
        return actions is not None

    def _carry_out_prefill(self, actions: tuple[PrefillAction, ...]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    assert self.prefill.state is not PrefillState.CLOSED
                    self.history.append(message)
                    self.to_decode.append(message)  # type: ignore[arg-type]
                case AttachSlab():
                    self._carry_out_prefill(self.prefill.attached(NONCE))
                case Enqueue(start):
                    self.engine.enqueue(start)
                case Dequeue(transfer_id):
                    self.engine.dequeue(transfer_id)
                case StopEngine(transfer_id):
                    self.engine.stop(transfer_id)
                case ReturnCredit(transfer_id, sequence):
                    self.engine.release(transfer_id, sequence)
                case SlabIdle():
                    assert self.engine.running is None
                    self.num_idle["prefill"] += 1
