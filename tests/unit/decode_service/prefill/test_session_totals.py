"""What a session counts stays countable after its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import Cancelled, PeerLost
from decode_service.prefill.session_totals import SessionTotals, totals_of
from tests.support.decode_sessions import leave, make_session_desk, streaming

pytestmark = pytest.mark.usefixtures("leak_check")


def test_sums_are_made_field_by_field() -> None:
    """A peer's totals are those of all its sessions."""
    first, second = SessionTotals(1, 2, 3, 4), SessionTotals(50, 60, 70, 80)

    assert sum([first, second], SessionTotals()) == SessionTotals(51, 62, 73, 84)


async def test_what_came_too_late_or_twice_is_counted(slab_dir: Path) -> None:
    """A span of an ended transfer, one of a transfer that never was, one that was told before."""
    with make_session_desk(slab_dir) as desk:
        await desk.open()
        transfer = await streaming(desk)
        desk.tell(transfer, transfer.spans[:1])
        transfer.prefill.abort(Cancelled("by the client"))
        leave(transfer)
        desk.tell(transfer, transfer.spans[2:4])
        desk.importer.finish()
        desk.cancelled(transfer)
        desk.cancelled(transfer)
        desk.session.close(PeerLost("the stream broke"))

        totals = totals_of(desk.session)

    assert totals == SessionTotals(late_events=2, unknown_messages=1, duplicate_spans=1)
