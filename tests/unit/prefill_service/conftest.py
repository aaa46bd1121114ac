"""What tests of one session with a decode service share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.prefill_peers import PeerDesk, make_peer_desk


@pytest.fixture
async def desk(slab_dir: Path) -> AsyncIterator[PeerDesk]:
    """A session that waits for Hello."""
    with make_peer_desk(slab_dir) as desk:
        yield desk
        desk.peer.check_integrity()
        desk.peer.close()
        assert desk.idle == [desk.peer]
