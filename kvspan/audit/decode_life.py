"""Replays the journal of one life of a decode service against rules 1 to 6 and 9.

Theory of operation: what is live is kept, by the names that the lines use, and nothing else; an event about
something that is not live is a breach of its own.

Not here: slots and pages (`decode_state.py`), one transfer's coverage (`transfers.py`), the producer's word
(`sealed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from common.telemetry.journal import Event
from kvspan.audit.decode_state import AuditedSession, ReservationBook
from kvspan.audit.entries import Entry
from kvspan.audit.findings import Findings
from kvspan.audit.life import Breach, Check, Life, descriptor_of
from kvspan.audit.sealed import Descriptor, Key, SealBook
from kvspan.audit.transfers import AuditedTransfer, Shape, Start


class DecodeLife(Life):
    """One life of a decode service."""

    role = "decode"

    def __init__(self, entry: Entry, findings: Findings, sealed: SealBook) -> None:
        super().__init__(entry.boot, findings, sealed)
        self._shape = Shape(entry.numbers("layers"), entry.numbers("row_bytes"))
        self._reservations = ReservationBook(entry.numbers("pages"))
        self._sessions: dict[str, AuditedSession] = {}
        # Invariant: every session whose slab is mapped, by the slab's name.

    def checks(self) -> Mapping[Event, Check]:
        """See `Life`."""
        return {
            Event.SESSION_OPENED: self._opened,
            Event.SESSION_CLOSED: self._closed,
            Event.SLAB_UNMAPPED: self._unmapped,
            Event.SLOT_LEASED: self._leased,
            Event.SLOT_FREED: self._freed,
            Event.RESERVATION_MADE: self._made,
            Event.RESERVATION_PUBLISHED: self._published,
            Event.RESERVATION_FREED: self._given_back,
            Event.LOCAL_STARTED: self._local_started,
            Event.LOCAL_ENDED: self._local_ended,
            Event.TRANSFER_STARTED: self._started,
            Event.PRODUCER_ENDED: self._producer_ended,
            Event.TRANSFER_COMPLETED: self._completed,
            Event.TRANSFER_ABORTED: self._aborted,
            Event.TRANSFER_DRAINED: self._drained,
            Event.SPAN_SUBMITTED: self._submitted,
            Event.SPAN_IMPORTED: self._imported,
            Event.SPAN_REFUSED: self._refused,
            Event.SPAN_RELEASED: self._released,
        }

    def held(self) -> tuple[str, ...]:
        """See `Life`."""
        held = [f"pages of reservation {number}" for number in self._reservations.numbers]
        for name, session in self._sessions.items():
            held.append(f"the slab of session {name}")
            held += [f"slot {slot} of session {name}" for slot in session.slots]
            held += [f"transfer {transfer} of session {name}" for transfer in session.transfers]
        return tuple(held)

    def _opened(self, entry: Entry) -> None:
        name, layers, ours = entry.text("session"), sum(entry.numbers("layers")), sum(self._shape.layers)
        # By group they may differ: a producer without windows has fewer groups.
        if layers != ours:
            self.blame("R3", entry, f"the peer owns {layers} layers, this side {ours}")
        if name in self._sessions:
            self.blame("R4", entry, f"session {name} is opened again on a slab that is mapped")
        self._sessions[name] = AuditedSession(entry.text("peer"), entry.range("data"))

    def _closed(self, entry: Entry) -> None:
        self.blame_all(entry, self._session(entry).close())

    def _unmapped(self, entry: Entry) -> None:
        session = self._session(entry)
        if not session.is_closed:
            self.blame("R4", entry, "the slab is unmapped while its session is open")
        for number in session.transfers:
            self.blame("R4", entry, f"the slab is unmapped and transfer {number} has not drained")
        del self._sessions[entry.text("session")]

    def _leased(self, entry: Entry) -> None:
        slot, generation = entry.number("slot"), entry.number("generation")
        self.blame_all(entry, self._session(entry).lease(slot, generation, entry.range("extent")))

    def _freed(self, entry: Entry) -> None:
        session = self._sessions.get(entry.text("session"))
        # With the slab every slot is gone; a request that never started gives its own back later.
        if session is not None:
            self.blame_all(entry, session.free(entry.number("slot"), entry.number("generation")))

    def _made(self, entry: Entry) -> None:
        breaches = self._reservations.make(entry.number("reservation"), entry.range_lists("pages"))
        self.blame_all(entry, breaches)

    def _published(self, entry: Entry) -> None:
        self.blame_all(entry, self._reservations.find(entry.number("reservation")).publish())

    def _given_back(self, entry: Entry) -> None:
        self.blame_all(entry, self._reservations.give_back(entry.number("reservation")))

    def _local_started(self, entry: Entry) -> None:
        reservation = self._reservations.find(entry.number("reservation"))
        self.blame_all(entry, reservation.take_writer())
        reservation.local = "running"

    def _local_ended(self, entry: Entry) -> None:
        reservation = self._reservations.find(entry.number("reservation"))
        if reservation.local != "running":
            self.blame("R6", entry, "the local engine ends, which does not run")
        reservation.local = entry.text("outcome")
        reservation.num_missing = entry.number("missing")

    def _started(self, entry: Entry) -> None:
        session, start = self._session(entry), _start_of(entry)
        reservation = self._reservations.find(start.reservation)
        transfer = AuditedTransfer(start, self._shape)
        if entry.range_lists("pages") != reservation.pages:
            self.blame("R1", entry, "the pages of the transfer are not those of its reservation")
        self.blame_all(entry, reservation.take_writer())
        self.blame_all(entry, session.start(transfer))
        reservation.transfer = transfer
        self.sealed.start(self._key(entry), (start.slot, start.generation, start.extent))

    def _producer_ended(self, entry: Entry) -> None:
        transfer, verdict = self._transfer(entry), entry.text("verdict")
        start = transfer.start
        # A terminal message of another attempt or lease says nothing of this one.
        if entry.number("attempt") != start.attempt:
            return
        if verdict == "done" and entry.number("generation") != start.generation:
            return
        # The first end stands, and so does the loss of the peer; a later word is noted and means nothing.
        if transfer.end:
            return
        sealed = self.sealed.find(self._key(entry))
        if sealed is not None and sealed.verdict not in ("", verdict):
            self.blame("R6", entry, f"the producer's end is {verdict} here and {sealed.verdict} there")
        if verdict == "done":
            transfer.sealed_totals = entry.pairs("totals")
        transfer.end = verdict

    def _completed(self, entry: Entry) -> None:
        transfer = self._transfer(entry)
        if transfer.outcome or transfer.is_completed:
            self.blame("R6", entry, f"the transfer completes after it was {transfer.outcome or 'complete'}")
        transfer.is_completed = True

    def _aborted(self, entry: Entry) -> None:
        transfer = self._transfer(entry)
        if transfer.outcome:
            self.blame("R6", entry, f"the transfer is aborted after it was {transfer.outcome}")
        transfer.outcome = transfer.outcome or "aborted"

    def _drained(self, entry: Entry) -> None:
        transfer, session = self._transfer(entry), self._session(entry)
        number, sealed = transfer.start.transfer, self.sealed.find(self._key(entry))
        if not transfer.outcome:
            self.blame("R6", entry, f"transfer {number} drains without an outcome")
        if not transfer.end:
            self.blame("R4", entry, f"transfer {number} drains before its producer has ended")
        if transfer.num_in_flight:
            self.blame("R4", entry, f"transfer {number} drains during {transfer.num_in_flight} imports")
        if sealed is not None and sealed.is_accepted and not sealed.is_drained and not session.is_closed:
            self.blame("R4", entry, f"transfer {number} drains here while its producer still writes")
        self.sealed.drop(self._key(entry))
        del session.transfers[number]
        self._reservations.forget_transfer(transfer)

    def _submitted(self, entry: Entry) -> None:
        transfer, sequence, span = self._transfer(entry), entry.number("sequence"), descriptor_of(entry)
        if entry.number("attempt") != transfer.start.attempt:
            self.blame("R3", entry, f"span {sequence} is of another attempt")
        self.blame_all(entry, transfer.submit(sequence, span))
        if self.sealed.is_kept(entry.text("peer")):
            sealed = self.sealed.find(self._key(entry))
            self._compare(entry, sequence, span, sealed.spans.get(sequence) if sealed is not None else None)

    def _imported(self, entry: Entry) -> None:
        self.expect("R3", entry, self._transfer(entry).imported(entry.number("sequence")))

    def _refused(self, entry: Entry) -> None:
        self.expect("R3", entry, self._transfer(entry).refused(entry.number("sequence")))

    def _released(self, entry: Entry) -> None:
        self.expect("R5", entry, self._transfer(entry).release(entry.number("sequence")))

    def _compare(self, entry: Entry, sequence: int, here: Descriptor, there: Descriptor | None) -> None:
        if there is None:
            self.blame("R3", entry, f"span {sequence} is imported and its producer never sealed it")
        elif here != there:
            self.blame("R3", entry, f"span {sequence} is {here} here and was sealed as {there}")

    def _session(self, entry: Entry) -> AuditedSession:
        name, peer = entry.text("session"), entry.text("peer")
        session = self._sessions.get(name)
        if session is None:
            raise Breach("R4", f"session {name} has no slab")
        if session.peer != peer:
            raise Breach("R3", f"session {name} is with {session.peer}, not with {peer}")
        return session

    def _transfer(self, entry: Entry) -> AuditedTransfer:
        number = entry.number("transfer")
        transfer = self._session(entry).transfers.get(number)
        if transfer is None:
            raise Breach("R6", f"transfer {number} has not started, or has drained")
        return transfer

    def _key(self, entry: Entry) -> Key:
        return (self.boot, entry.text("session"), entry.number("transfer"), entry.number("attempt"))


def _start_of(entry: Entry) -> Start:
    return Start(
        transfer=entry.number("transfer"),
        attempt=entry.number("attempt"),
        reservation=entry.number("reservation"),
        slot=entry.number("slot"),
        generation=entry.number("generation"),
        extent=entry.range("extent"),
        required=entry.ranges("required"),
    )
