"""Replays the journal of one life of a prefill service: slots it may write, spans it seals, ends it sends.

Theory of operation: a transfer lives from its acceptance until it has drained and, while the session is
open, been answered. Its bytes are sealed once until they are released (rule 5); one answer is sent, after the
last byte (rules 4 and 6).

Not here: whether decode did right by what was sealed (`decode_life.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from common.kv.ranges import Range
from common.telemetry.journal import Event
from kvspan.audit.entries import Entry
from kvspan.audit.extents import Extents
from kvspan.audit.findings import Findings
from kvspan.audit.life import Breach, Check, Life, descriptor_of
from kvspan.audit.sealed import Descriptor, Key, SealBook


@dataclass(slots=True)
class _Job:
    slot: int
    generation: int
    extent: Range
    attempt: int
    is_drained: bool = False
    sealed: dict[int, Range] = field(default_factory=dict)
    """Extents of the spans sealed and not released, by sequence number."""

    highest_sequence: int = -1
    _bytes: Extents = field(default_factory=Extents)
    # Invariant: has the extents of `sealed`.

    def seal(self, sequence: int, span: Descriptor) -> Iterator[tuple[str, str]]:
        """Take a span that is sealed; yields each broken rule."""
        if self.is_drained:
            yield "R5", f"span {sequence} is sealed after the transfer has drained"
        if sequence <= self.highest_sequence:
            yield "R5", f"span {sequence} is sealed again, or out of order"
        if (span.slot, span.generation) != (self.slot, self.generation):
            yield "R3", f"span {sequence} names another slot than {self.slot} of generation {self.generation}"
        if not self.extent.contains(span.extent):
            yield "R3", f"span {sequence} has bytes {span.extent} outside the slot {self.extent}"
        other = self._bytes.add(span.extent, str(sequence))
        if other is not None:
            yield "R5", f"span {sequence} is sealed over bytes of span {other}, which is not released"
        self.sealed[sequence] = span.extent
        self.highest_sequence = max(sequence, self.highest_sequence)

    def credit(self, sequence: int) -> str:
        """Take a release; returns what is wrong with it."""
        extent = self.sealed.pop(sequence, None)
        if extent is None:
            return f"span {sequence} is released, which holds no bytes"
        self._bytes.remove(extent, str(sequence))
        return ""


@dataclass(slots=True)
class _Peer:
    decode_boot: str
    is_closed: bool = False
    highest_transfer: int = 0
    slots: Extents = field(default_factory=Extents)
    """Extents of the slots of `jobs` that have not drained."""

    jobs: dict[int, _Job] = field(default_factory=dict)


class PrefillLife(Life):
    """One life of a prefill service."""

    role = "prefill"

    def __init__(self, entry: Entry, findings: Findings, sealed: SealBook) -> None:
        super().__init__(entry.boot, findings, sealed)
        self._num_layers = sum(entry.numbers("layers"))
        self._peers: dict[str, _Peer] = {}
        # Invariant: every session whose slab is mapped, by the slab's name.
        sealed.prefill_started(self.boot)

    def checks(self) -> Mapping[Event, Check]:
        """See `Life`."""
        return {
            Event.SESSION_OPENED: self._opened,
            Event.SESSION_CLOSED: self._closed,
            Event.SLAB_UNMAPPED: self._unmapped,
            Event.TRANSFER_ACCEPTED: self._accepted,
            Event.SPAN_SEALED: self._sealed,
            Event.SPAN_CREDITED: self._credited,
            Event.TRANSFER_DRAINED: self._drained,
            Event.TRANSFER_ANSWERED: self._answered,
        }

    def held(self) -> tuple[str, ...]:
        """See `Life`."""
        held = []
        for name, peer in self._peers.items():
            held.append(f"the slab of session {name}")
            held += [f"transfer {number} of session {name}" for number in peer.jobs]
        return tuple(held)

    def _opened(self, entry: Entry) -> None:
        name, layers = entry.text("session"), sum(entry.numbers("layers"))
        # By group they may differ: the groups of a session are decode's.
        if layers != self._num_layers:
            self.blame("R3", entry, f"the session has {layers} layers, owned are {self._num_layers}")
        if name in self._peers:
            self.blame("R4", entry, f"session {name} is opened again on a slab that is mapped")
        self._peers[name] = _Peer(entry.text("peer"))

    def _closed(self, entry: Entry) -> None:
        peer = self._peer(entry)
        if peer.is_closed:
            self.blame("R6", entry, "the session was closed before")
        peer.is_closed = True
        peer.jobs = {number: job for number, job in peer.jobs.items() if not job.is_drained}

    def _unmapped(self, entry: Entry) -> None:
        peer = self._peer(entry)
        if not peer.is_closed:
            self.blame("R4", entry, "the slab is unmapped while its session is open")
        for number in peer.jobs:
            self.blame("R4", entry, f"the slab is unmapped and transfer {number} has not drained")
        del self._peers[entry.text("session")]

    def _accepted(self, entry: Entry) -> None:
        peer, number, extent = self._peer(entry), entry.number("transfer"), entry.range("extent")
        job = _Job(entry.number("slot"), entry.number("generation"), extent, entry.number("attempt"))
        if number <= peer.highest_transfer:
            self.blame("R6", entry, f"transfer id {number} was used before")
        other = peer.slots.add(extent, str(number))
        if other is not None:
            self.blame("R1", entry, f"the slot of transfer {number} overlaps that of {other}")
        sealed = self.sealed.find(self._key(entry))
        if sealed is not None:
            if sealed.slot != (job.slot, job.generation, extent):
                self.blame("R1", entry, f"transfer {number} is accepted in another slot than decode leased")
            sealed.is_accepted = True
        peer.jobs[number] = job
        peer.highest_transfer = max(number, peer.highest_transfer)

    def _sealed(self, entry: Entry) -> None:
        job, sequence, span = self._job(entry), entry.number("sequence"), descriptor_of(entry)
        self.blame_all(entry, job.seal(sequence, span))
        sealed = self.sealed.find(self._key(entry))
        if sealed is not None:
            sealed.spans[sequence] = span

    def _credited(self, entry: Entry) -> None:
        self.expect("R5", entry, self._job(entry).credit(entry.number("sequence")))

    def _drained(self, entry: Entry) -> None:
        peer, job, number = self._peer(entry), self._job(entry), entry.number("transfer")
        if job.is_drained:
            self.blame("R6", entry, f"transfer {number} drained before")
        job.is_drained = True
        peer.slots.remove(job.extent, str(number))
        sealed = self.sealed.find(self._key(entry))
        if sealed is not None:
            sealed.is_drained = True
        if peer.is_closed:
            del peer.jobs[number]

    def _answered(self, entry: Entry) -> None:
        peer, job, number = self._peer(entry), self._job(entry), entry.number("transfer")
        if not job.is_drained:
            self.blame("R4", entry, f"transfer {number} is answered before it has drained")
        sealed = self.sealed.find(self._key(entry))
        if sealed is not None:
            sealed.verdict = entry.text("verdict")
        peer.slots.remove(job.extent, str(number))
        del peer.jobs[number]

    def _peer(self, entry: Entry) -> _Peer:
        name, decode_boot = entry.text("session"), entry.text("peer")
        peer = self._peers.get(name)
        if peer is None:
            raise Breach("R4", f"session {name} has no slab")
        if peer.decode_boot != decode_boot:
            raise Breach("R3", f"session {name} is with {peer.decode_boot}, not with {decode_boot}")
        return peer

    def _job(self, entry: Entry) -> _Job:
        number = entry.number("transfer")
        job = self._peer(entry).jobs.get(number)
        if job is None or job.attempt != entry.number("attempt"):
            raise Breach("R6", f"transfer {number} was not accepted, or has ended")
        return job

    def _key(self, entry: Entry) -> Key:
        return (entry.text("peer"), entry.text("session"), entry.number("transfer"), entry.number("attempt"))
