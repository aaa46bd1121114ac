"""What becomes of the transfers of one session: lines in the log, and counts that outlive the session.

Theory of operation: as for the journal, the session machine says what it decides. Every line about a transfer
names it as decode does (request id, transfer id), and its session, so that the logs of both services join.
What a peer says is cut and made printable first.

Ownership: one per stream; event loop only. Not here: what an auditor replays (`journaling.py`).
"""

from __future__ import annotations

import logging

from common.errors import LeaseExpired
from common.excerpt import printable
from common.session.actions import Enqueue, PrefillAction, Send
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    SpanSealed,
    StartPrefill,
)
from common.telemetry.logging import log_fields
from prefill_service.totals import Totals

logger = logging.getLogger(__name__)

Names = dict[str, object]


def names_of(session: int, start: StartPrefill) -> Names:
    """Return what a line about a transfer is found by, in the logs of both services."""
    return {
        "request_id": printable(start.request_id),
        "session": session,
        "transfer_id": start.transfer_id,
    }


class TransferLog:
    """Says and counts what happens to the transfers of one session."""

    def __init__(self, session: int, totals: Totals) -> None:
        self._session = session
        self._totals = totals
        self._live: dict[int, Names] = {}
        # Invariant: by transfer id, those that were accepted and have not been answered.
        self._asked: Names = {}
        # Invariant: names the start that came last, which may be refused.

    @property
    def num_live(self) -> int:
        """Transfers accepted and not answered."""
        return len(self._live)

    def received(self, message: DecodeMessage) -> None:
        """Note who asks, and what is to end."""
        match message:
            case StartPrefill():
                self._asked = names_of(self._session, message)
            case CancelPrefill() if message.transfer_id in self._live:
                fields = log_fields(**self._live[message.transfer_id], cause=printable(message.cause))
                logger.info("cancel.received", extra=fields)
            case _:
                pass

    def acted(self, action: PrefillAction) -> None:
        """Note what the session machine decided."""
        match action:
            case Send(SpanSealed(span)):
                self._totals.sealed_spans += 1
                self._totals.sealed_bytes += span.length
            case Enqueue(start):
                self._totals.accepted += 1
                names = self._live[start.transfer_id] = names_of(self._session, start)
                size = {"tokens": len(start.token_ids), "slot_bytes": start.slot_size}
                fields = log_fields(**names, mode=start.mode.value, **size)
                logger.info("transfer.accepted", extra=fields)
            case Send(PrefillDone() as done):
                self._totals.done += 1
                spans = sum(group.num_spans for group in done.totals)
                num_bytes = sum(group.num_bytes for group in done.totals)
                fields = log_fields(**self._live.pop(done.transfer_id), spans=spans, bytes=num_bytes)
                logger.info("transfer.done", extra=fields)
            case Send(PrefillCancelled() as cancelled):
                self._totals.cancelled += 1
                fields = log_fields(**self._live.pop(cancelled.transfer_id))
                logger.info("transfer.cancelled", extra=fields)
            case Send(PrefillFailed() as failed):
                self._failed(failed)
            case _:
                pass

    def started(self, transfer_id: int, queued_ns: int) -> None:
        """The engine begins."""
        fields = log_fields(**self._live[transfer_id], queued_s=round(queued_ns / 1e9, 3))
        logger.info("transfer.started", extra=fields)

    def closed(self) -> None:
        """The stream has ended: nobody hears any more how its transfers end."""
        self._totals.abandoned += len(self._live)
        for names in self._live.values():
            logger.info("transfer.abandoned", extra=log_fields(**names))
        self._live.clear()

    def _failed(self, failed: PrefillFailed) -> None:
        """Count and say the worse end; decode decides whether the request is lost with it."""
        names = self._live.pop(failed.transfer_id, None)
        why = {"reason": failed.reason, "problem": failed.message}
        if names is None:
            self._totals.refused += 1
            logger.warning("transfer.refused", extra=log_fields(**self._asked, **why))
            return
        has_expired = failed.reason == LeaseExpired.code
        self._totals.expired += has_expired
        self._totals.failed += not has_expired
        logger.warning("transfer.failed", extra=log_fields(**names, **why))
