"""One prompt in a session with a prefill service: what it holds, and how the request that waits sees it.

Ownership: the session's `SessionTransfers` makes and keeps the `HeldTransfer`; the request has the
`RemotePrefill`. Event loop only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from common.engine.prefill import Logits
from common.errors import KVSpanError
from common.session.peer_times import PeerTimes
from common.slab.allocator import Slot
from common.telemetry.timeline import Timeline
from decode_service.cache.reservation import Reservation


@dataclass(slots=True)
class HeldTransfer:
    """What a transfer holds until it has drained."""

    transfer_id: int
    request_id: str
    """Name of the request in the logs of both services."""

    slot: Slot
    prompt_len: int
    reservation: Reservation
    timeline: Timeline
    outcome: asyncio.Future[None]
    """Set by the first terminal event."""

    times: PeerTimes
    """What the producer tells of time."""

    error: KVSpanError | None = None
    """The first terminal event when it is a failure; stays when the transfer has drained."""

    failed_ns: int | None = None
    """When it failed or was given up; it should drain soon after."""


class TransferKeeper(Protocol):
    """Whoever keeps transfers until they have drained, by their id."""

    def abort(self, transfer_id: int, error: KVSpanError) -> None:
        """Give a transfer up; nothing happens when it has ended."""

    def prove_complete(self, transfer_id: int) -> Logits:
        """Return the logits of a complete transfer; raises unless its state is COMPLETE."""

    def published(self, transfer_id: int) -> None:
        """Record the publication of a transfer's pages."""


class RemotePrefill:
    """One transfer as the request that waits for it sees it (`publication.FinishedPrefill`)."""

    def __init__(self, keeper: TransferKeeper, held: HeldTransfer) -> None:
        self._keeper = keeper
        self._held = held

    async def wait(self) -> None:
        """Wait until the transfer is complete; raises the error that ended it."""
        await self._held.outcome

    def abort(self, error: KVSpanError) -> None:
        """Give the transfer up; nothing happens when it has ended."""
        self._keeper.abort(self._held.transfer_id, error)

    def prove_complete(self) -> Logits:
        """See `FinishedPrefill`: all of rule 2 is what `TransferState.COMPLETE` means."""
        # What was given up proves nothing, however complete it was.
        if self._held.error is not None:
            raise self._held.error
        return self._keeper.prove_complete(self._held.transfer_id)

    def settle(self) -> None:
        """See `FinishedPrefill`."""
        self._keeper.published(self._held.transfer_id)
