"""What the prefill service writes into its journal: sessions, transfers and the spans it seals.

Theory of operation: the session machine says what it decides and the adapter what it receives; each becomes
a line before it is carried out, so that no message leaves before its line is written.

Ownership: one `PrefillJournal` per service, one `PeerJournal` per stream; event loop only.
Not here: the file (`common/telemetry/journal.py`).
"""

from __future__ import annotations

from typing import Any

from common.kv.geometry import KVGeometry
from common.session.actions import Enqueue, PrefillAction, Send, SlabIdle
from common.session.messages import (
    DecodeMessage,
    Hello,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ReleaseSpan,
    SpanSealed,
    StartPrefill,
    Welcome,
)
from common.telemetry.journal import Event, JournalStatistics, NullJournal, Recorder, span_fields

Fields = dict[str, Any]


class PrefillJournal:
    """Lines of the service as a whole."""

    def __init__(self, journal: Recorder | None = None) -> None:
        self._journal: Recorder = journal or NullJournal()

    def statistics(self) -> JournalStatistics | None:
        """Return what this life has written; None when the journal is off."""
        return self._journal.statistics()

    def service_started(self, geometry: KVGeometry) -> None:
        """The process begins to serve; nothing is held."""
        groups = geometry.groups
        fields = {
            "peer": "",
            "role": "prefill",
            "layers": [group.num_layers for group in groups],
            "row_bytes": [group.row_bytes for group in groups],
        }
        self._journal.record(Event.SERVICE_STARTED, fields)

    def service_stopped(self) -> None:
        """The process ends in order."""
        self._journal.record(Event.SERVICE_STOPPED, {"peer": ""})

    def peer(self) -> PeerJournal:
        """Return what takes the lines of one stream."""
        return PeerJournal(self._journal)


class PeerJournal:
    """Lines of one session with a decode service."""

    def __init__(self, journal: Recorder) -> None:
        self._journal = journal
        self._is_on = not isinstance(journal, NullJournal)
        self._name: Fields = {"peer": "", "session": ""}
        self._is_open = False
        self._layers: list[int] = []
        # Invariant: layers of each group of the geometry in Hello, by which spans are named.
        self._attempts: dict[int, int] = {}
        # Invariant: attempts of the transfers that were accepted and not answered.

    def received(self, message: DecodeMessage) -> None:
        """Note who the peer is, and the credit that it gives."""
        if not self._is_on:
            return
        match message:
            case Hello() if not self._is_open:
                self._name = {"peer": message.boot_id, "session": message.slab.name}
                self._layers = [group.num_layers for group in message.identity.geometry.groups]
            case ReleaseSpan() if self._attempts.get(message.transfer_id) == message.attempt:
                self._on_transfer(Event.SPAN_CREDITED, message.transfer_id, sequence=message.sequence)
            case _:
                pass

    def acted(self, action: PrefillAction) -> None:
        """Note what the session machine decided, before it is carried out."""
        if not self._is_on:
            return
        match action:
            case Send(SpanSealed(span)):
                self._record(Event.SPAN_SEALED, span_fields(span))
            case Send(Welcome() as welcome):
                self._opened(welcome)
            case Enqueue(start):
                self._accepted(start)
            case Send(PrefillDone() as done):
                self._answered(done.transfer_id, "done")
            case Send(PrefillFailed() as failed):
                self._answered(failed.transfer_id, "failed")
            case Send(PrefillCancelled() as cancelled):
                self._answered(cancelled.transfer_id, "cancelled")
            case SlabIdle() if self._is_open:
                self._record(Event.SLAB_UNMAPPED, {})
            case _:
                pass

    def drained(self, transfer_id: int) -> None:
        """Nothing writes into the slot any more."""
        if not self._is_on:
            return
        self._on_transfer(Event.TRANSFER_DRAINED, transfer_id)

    def closed(self) -> None:
        """The stream has ended; no line when the session never opened."""
        if self._is_open:
            self._record(Event.SESSION_CLOSED, {})

    def _opened(self, welcome: Welcome) -> None:
        self._is_open = True
        self._record(Event.SESSION_OPENED, {"digest": welcome.digest.value, "layers": self._layers})

    def _accepted(self, start: StartPrefill) -> None:
        self._attempts[start.transfer_id] = start.attempt
        fields = {
            "slot": start.slot_id,
            "generation": start.generation,
            "extent": [start.slot_offset, start.slot_offset + start.slot_size],
            "exported": [[tokens.start, tokens.stop] for tokens in start.required],
            "mode": start.mode.value,
        }
        self._on_transfer(Event.TRANSFER_ACCEPTED, start.transfer_id, **fields)

    def _answered(self, transfer_id: int, verdict: str) -> None:
        """Note a terminal message; the refusal of a start that was never accepted has no line."""
        if transfer_id in self._attempts:
            self._on_transfer(Event.TRANSFER_ANSWERED, transfer_id, verdict=verdict)
            del self._attempts[transfer_id]

    def _on_transfer(self, event: Event, transfer_id: int, **fields: object) -> None:
        self._record(event, {"transfer": transfer_id, "attempt": self._attempts[transfer_id], **fields})

    def _record(self, event: Event, fields: Fields) -> None:
        self._journal.record(event, {**self._name, **fields})
