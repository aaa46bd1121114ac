"""How the decode service connects to a prefill service."""

import asyncio
from pathlib import Path

import pytest

from common.runtime.clock import ManualClock
from common.session.messages import Hello, SlabHandle
from common.slab.segment import SlabSegment
from decode_service.prefill_client import PeerConfig, make_slab
from tests.support.sessions import make_hello

pytestmark = pytest.mark.usefixtures("leak_check")


def make_config(slab_dir: Path) -> PeerConfig:
    """Return a configuration with a slab of 16 MiB."""

    def hello(slab: SlabHandle) -> Hello:
        return make_hello()

    return PeerConfig(hello, slab_dir, 16 << 20, "decode-boot", 7.0, ManualClock(30))


def names_in(slab_dir: Path) -> list[str]:
    """Return the names of the slabs that are there."""
    return [path.name for path in slab_dir.iterdir()]


async def test_a_slab_is_that_of_the_configuration(slab_dir: Path) -> None:
    """Size, owner and place."""
    with await make_slab(make_config(slab_dir)) as slab:
        assert (slab.size_bytes, slab.boot_id) == (16 << 20, "decode-boot")
        assert names_in(slab_dir) == [slab.name]


async def test_a_service_that_stops_while_a_slab_is_made_leaves_none(
    slab_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that makes it cannot be stopped, so its slab is closed when it is there (rule 9)."""
    made: list[SlabSegment] = []
    create = SlabSegment.create

    def note(directory: Path, size_bytes: int, boot_id: str) -> SlabSegment:
        made.append(create(directory, size_bytes, boot_id))
        return made[0]

    monkeypatch.setattr(SlabSegment, "create", note)
    making = asyncio.create_task(make_slab(make_config(slab_dir)))
    await asyncio.sleep(0)

    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making

    assert [slab.is_closed for slab in made] == [True]
    assert not names_in(slab_dir)
