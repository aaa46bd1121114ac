"""One prompt in a session with a prefill service, as the request that waits for it sees it.

Ownership: `PeerSession` makes and keeps the `HeldTransfer`; the request has the `RemotePrefill`. Event loop
only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import KVSpanError
from common.session.messages import StartPrefill
from common.slab.allocator import Slot
from common.telemetry.timeline import Timeline
from decode_service.cache.reservation import Reservation

if TYPE_CHECKING:
    from torch import Tensor

    from decode_service.prefill.peer_session import PeerSession


@dataclass(slots=True)
class HeldTransfer:
    """What a transfer holds until it has drained."""

    slot: Slot
    prompt_len: int
    reservation: Reservation
    timeline: Timeline
    outcome: asyncio.Future[None]
    """Set by the first terminal event."""

    error: KVSpanError | None = None
    """The first terminal event when it is a failure; stays when the transfer has drained."""

    failed_ns: int | None = None
    """When it failed or was given up; it should drain soon after."""


class RemotePrefill:
    """One transfer as the request that waits for it sees it (`publication.FinishedPrefill`)."""

    def __init__(self, session: PeerSession, start: StartPrefill, held: HeldTransfer) -> None:
        self._session = session
        self._start = start
        self._held = held

    @property
    def transfer_id(self) -> int:
        """Name inside the session."""
        return self._start.transfer_id

    async def wait(self) -> None:
        """Wait until the transfer is complete; raises the error that ended it."""
        await self._held.outcome

    def abort(self, error: KVSpanError) -> None:
        """Give the transfer up; nothing happens when it has ended."""
        self._session.abort(self.transfer_id, error)

    def prove_complete(self) -> Tensor:
        """See `FinishedPrefill`: all of rule 2 is what `TransferState.COMPLETE` means."""
        # A complete transfer may be lost with its session before its call has had its turn.
        if self._held.error is not None:
            raise self._held.error
        return self._session.prove_complete(self.transfer_id)

    def settle(self) -> None:
        """See `FinishedPrefill`."""
        self._session.published(self.transfer_id)
