"""What tests of one session with a prefill service share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import PeerLost
from tests.support.decode_sessions import SessionDesk, make_session_desk


@pytest.fixture
async def desk(slab_dir: Path) -> AsyncIterator[SessionDesk]:
    """An open session; at the end it is closed and must leave nothing."""
    with make_session_desk(slab_dir) as desk:
        await desk.open()
        yield desk
        desk.session.check_integrity()
        desk.session.close(PeerLost("the stream broke"))
        desk.importer.finish()
        assert desk.session.slots.is_unmapped
        assert desk.num_slots == 0
