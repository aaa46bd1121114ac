"""What the decode service writes into its journal: pages, slots, transfers, spans and their ends.

Theory of operation: rules stay where they are; owners and session machines say what they do, and these
classes turn it into lines *before* it takes effect for anybody else. So what a line frees is free, and what
a line takes was free, in the order of the lines.

Ownership: one `DecodeJournal` per service, one `SessionJournal` per session; event loop only.
Not here: the file (`common/telemetry/journal.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.kv.geometry import KVGeometry
from common.kv.ranges import Range
from common.kv.spans import Span
from common.session.actions import (
    DecodeAction,
    ImportSpan,
    Send,
    SlabIdle,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.messages import (
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillMessage,
    ReleaseSpan,
    StartPrefill,
    Welcome,
)
from common.slab.allocator import Slot
from common.telemetry.journal import Event, NullJournal, Recorder, page_runs, range_field, span_fields
from decode_service.cache.reservation import Reservation

Fields = dict[str, Any]


class DecodeJournal:
    """Lines of the service as a whole, and of reservations."""

    def __init__(self, journal: Recorder | None = None) -> None:
        self._journal: Recorder = journal or NullJournal()
        self._names: dict[Reservation, Fields] = {}
        # Invariant: has every live reservation: its number, and the transfer it was last used for.
        self._num_reservations = 0

    def service_started(self, geometry: KVGeometry, num_pages: Sequence[int]) -> None:
        """The process begins to serve; nothing is held."""
        groups = geometry.groups
        fields = {
            "peer": "",
            "role": "decode",
            "layers": [group.num_layers for group in groups],
            "row_bytes": [group.row_bytes for group in groups],
            "pages": list(num_pages),
        }
        self._journal.record(Event.SERVICE_STARTED, fields)

    def service_stopped(self) -> None:
        """The process ends in order."""
        self._journal.record(Event.SERVICE_STOPPED, {"peer": ""})

    def session(self, slab_name: str) -> SessionJournal:
        """Return what takes the lines of one session."""
        return SessionJournal(self._journal, slab_name, self._names)

    def reservation_made(self, reservation: Reservation) -> None:
        """Pages were taken; called before anybody else can ask for pages."""
        self._num_reservations += 1
        name = {"peer": "", "reservation": self._num_reservations}
        self._names[reservation] = name
        pages = [page_runs(taken) for taken in reservation.pages.pages]
        self._journal.record(Event.RESERVATION_MADE, {**name, "pages": pages})

    def reservation_published(self, reservation: Reservation) -> None:
        """Pages became readable."""
        self._journal.record(Event.RESERVATION_PUBLISHED, self._names[reservation])

    def reservation_freed(self, reservation: Reservation) -> None:
        """Pages are about to come back."""
        self._journal.record(Event.RESERVATION_FREED, self._names.pop(reservation))

    def local_started(self, reservation: Reservation, required: Sequence[Range]) -> None:
        """The engine of this process may write into the pages."""
        fields = {**self._names[reservation], "required": [range_field(tokens) for tokens in required]}
        self._journal.record(Event.LOCAL_STARTED, fields)

    def local_ended(self, reservation: Reservation, outcome: str, num_missing: int) -> None:
        """The engine writes no more; `outcome` is `done` or the class of the error."""
        fields = {**self._names[reservation], "outcome": outcome, "missing": num_missing}
        self._journal.record(Event.LOCAL_ENDED, fields)


class SessionJournal:
    """Lines of one session with a prefill service."""

    def __init__(self, journal: Recorder, slab_name: str, names: dict[Reservation, Fields]) -> None:
        self._journal = journal
        self._is_on = not isinstance(journal, NullJournal)
        self._names = names
        self._name: Fields = {"peer": "", "session": slab_name}
        self._attempts: dict[int, int] = {}
        # Invariant: attempts of the transfers that have started and not drained.

    def opened(self, welcome: Welcome, data: Range) -> None:
        """Transfers may start; `data` are the bytes of the slab that can be leased."""
        self._name = {**self._name, "peer": welcome.boot_id}
        groups = welcome.identity.geometry.groups
        fields = {
            "data": range_field(data),
            "digest": welcome.digest.value,
            "layers": [group.num_layers for group in groups],
        }
        self._record(Event.SESSION_OPENED, fields)

    def closed(self) -> None:
        """The stream has ended and the slab is abandoned; no line when it never opened."""
        if self._name["peer"]:
            self._record(Event.SESSION_CLOSED, {})

    def slot_leased(self, slot: Slot) -> None:
        """Bytes of the slab were taken."""
        fields = {"slot": slot.slot_id, "generation": slot.generation, "extent": range_field(slot.extent)}
        self._record(Event.SLOT_LEASED, fields)

    def slot_freed(self, slot: Slot) -> None:
        """Bytes of the slab are about to come back."""
        self._record(Event.SLOT_FREED, {"slot": slot.slot_id, "generation": slot.generation})

    def transfer_started(
        self, start: StartPrefill, reservation: Reservation, required: Sequence[Range]
    ) -> None:
        """A transfer may be asked for; pages and slot are held."""
        if not self._is_on:
            return
        name = {"transfer": start.transfer_id, "attempt": start.attempt}
        self._attempts[start.transfer_id] = start.attempt
        number = self._names[reservation]["reservation"]
        self._names[reservation] = {**self._name, "reservation": number, **name}
        fields = {
            **name,
            "reservation": number,
            "slot": start.slot_id,
            "generation": start.generation,
            "extent": [start.slot_offset, start.slot_offset + start.slot_size],
            "pages": [page_runs(taken) for taken in reservation.pages.pages],
            "required": [range_field(tokens) for tokens in required],
            "mode": start.mode.value,
        }
        self._record(Event.TRANSFER_STARTED, fields)

    def received(self, message: PrefillMessage) -> None:
        """Note the terminal message of a transfer that has not drained."""
        match message:
            case PrefillDone():
                totals = [[total.num_spans, total.num_bytes] for total in message.totals]
                self._ended(message, {"verdict": "done", "generation": message.generation, "totals": totals})
            case PrefillFailed():
                self._ended(message, {"verdict": "failed"})
            case PrefillCancelled():
                self._ended(message, {"verdict": "cancelled"})
            case _:
                pass

    def acted(self, action: DecodeAction) -> None:
        """Note what the session machine decided, before it is carried out."""
        if not self._is_on:
            return
        match action:
            case ImportSpan(span):
                self._record(Event.SPAN_SUBMITTED, span_fields(span))
            case Send(ReleaseSpan() as release):
                self._on_transfer(Event.SPAN_RELEASED, release.transfer_id, sequence=release.sequence)
            case TransferComplete(transfer_id):
                self._on_transfer(Event.TRANSFER_COMPLETED, transfer_id)
            case TransferFailed(transfer_id, error):
                self._on_transfer(Event.TRANSFER_ABORTED, transfer_id, reason=error.code)
            case TransferDrained(transfer_id):
                self._on_transfer(Event.TRANSFER_DRAINED, transfer_id)
                del self._attempts[transfer_id]
            case SlabIdle():
                if self._name["peer"]:
                    self._record(Event.SLAB_UNMAPPED, {})
            case _:
                pass

    def imported(self, span: Span) -> None:
        """The copy of a span has ended and its digest matched."""
        if not self._is_on:
            return
        self._on_transfer(Event.SPAN_IMPORTED, span.transfer_id, sequence=span.sequence)

    def refused(self, span: Span, reason: str) -> None:
        """The copy of a span has ended badly."""
        if not self._is_on:
            return
        self._on_transfer(Event.SPAN_REFUSED, span.transfer_id, sequence=span.sequence, reason=reason)

    def _ended(self, message: PrefillDone | PrefillFailed | PrefillCancelled, fields: Fields) -> None:
        if message.transfer_id in self._attempts:
            name = {"transfer": message.transfer_id, "attempt": message.attempt}
            self._record(Event.PRODUCER_ENDED, {**name, **fields})

    def _on_transfer(self, event: Event, transfer_id: int, **fields: object) -> None:
        name = {"transfer": transfer_id, "attempt": self._attempts[transfer_id]}
        self._record(event, {**name, **fields})

    def _record(self, event: Event, fields: Fields) -> None:
        self._journal.record(event, {**self._name, **fields})
