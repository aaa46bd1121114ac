"""The shared memory of one session: making, handing over, mapping, checking and ending it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError, InvariantViolation, SlabNotShared
from common.kv.ranges import Range
from common.slab.door import SlabDoor
from common.slab.header import HEADER_BYTES, SlabHeader
from common.slab.mapped import MappedSlabs, MappedStatistics
from common.slab.sealed_memory import make_memory
from common.slab.segment import SlabSegment
from tests.support.slabs import make_slabs, served_slab

SIZE = 3 * HEADER_BYTES
NAME = f"kvspan-{'05' * 12}.sock"


@pytest.fixture
async def slab(tmp_path: Path) -> AsyncIterator[SlabSegment]:
    """A slab of two pages of data, by its owner, with a door that is served."""
    with served_slab(tmp_path, SIZE, "boot-7") as slab:
        yield slab


@pytest.fixture
def mapped() -> Iterator[MappedSlabs]:
    """The list of the peer, on which nothing may be left."""
    mapped = make_slabs(slab_bytes=4 * SIZE)
    yield mapped
    mapped.check_integrity()
    assert mapped.statistics() == MappedStatistics(0, 0)


async def attach(directory: Path, name: str, size_bytes: int, mapped: MappedSlabs) -> SlabSegment:
    """Map a slab as a peer does, beside the loop."""
    return await asyncio.to_thread(SlabSegment.attach, directory, name, size_bytes, mapped)


def num_descriptors() -> int:
    """Return how many are open."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size_bytes", [0, HEADER_BYTES, SIZE + 1, -HEADER_BYTES])
def test_create_is_refused_when_the_size_is_not_whole_pages(tmp_path: Path, size_bytes: int) -> None:
    """A header page and at least one page of data."""
    with pytest.raises(ConfigError) as caught:
        SlabSegment.create(tmp_path, size_bytes, "boot-7")

    assert caught.value.field == "slab_bytes"
    assert list(tmp_path.iterdir()) == []


def test_create_is_refused_when_the_directory_is_missing(tmp_path: Path) -> None:
    """The error names the directory; no descriptor of the memory is kept."""
    before = num_descriptors()

    with pytest.raises(ConfigError, match="missing") as caught:
        SlabSegment.create(tmp_path / "missing", SIZE, "boot-7")

    assert (caught.value.field, num_descriptors()) == ("slab_dir", before)


def test_create_leaves_nothing_when_mapping_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation that fails leaves everything as it was."""

    def fails(mapping: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = num_descriptors()
    monkeypatch.setattr("common.slab.segment.populate", fails)

    with pytest.raises(ConfigError, match=f"slab_bytes={SIZE}: cannot map it: Cannot allocate memory"):
        SlabSegment.create(tmp_path, SIZE, "boot-7")

    assert (list(tmp_path.iterdir()), num_descriptors()) == ([], before)


async def test_a_peer_sees_the_same_bytes_nonce_and_boot_id(
    tmp_path: Path, slab: SlabSegment, mapped: MappedSlabs
) -> None:
    """The nonce read from the memory proves that both map the same."""
    with await attach(tmp_path, slab.name, SIZE, mapped) as peer:
        peer.view(HEADER_BYTES + 64, 5)[:] = b"spans"

        assert (peer.nonce, peer.boot_id, peer.name) == (slab.nonce, "boot-7", slab.name)
        assert bytes(slab.view(HEADER_BYTES + 64, 5)) == b"spans"


async def test_two_pairs_have_their_own_slabs_in_one_directory(tmp_path: Path, slab: SlabSegment) -> None:
    """Names and nonces never collide, and one pair's bytes are not the other's (G5)."""
    with SlabSegment.create(tmp_path, SIZE, "boot-8") as other:
        slab.view(HEADER_BYTES, 1)[0] = 1
        other.view(HEADER_BYTES, 1)[0] = 2

        assert other.name != slab.name
        assert other.nonce != slab.nonce
        assert slab.view(HEADER_BYTES, 1)[0] == 1


async def test_what_nobody_has_any_more_is_gone(tmp_path: Path, mapped: MappedSlabs) -> None:
    """A session that comes and goes leaves neither a descriptor nor a name."""
    before = num_descriptors()

    with served_slab(tmp_path, SIZE, "boot-7") as slab, await attach(tmp_path, slab.name, SIZE, mapped):
        slab.door.close()
        # One in the mapping of each side.
        assert num_descriptors() == before + 2

    assert (os.listdir(tmp_path), num_descriptors()) == ([], before)


async def test_both_mappings_stay_valid_when_the_door_is_closed(
    tmp_path: Path, slab: SlabSegment, mapped: MappedSlabs
) -> None:
    """The name goes as soon as the peer has mapped the memory, which goes with the last mapping."""
    with await attach(tmp_path, slab.name, SIZE, mapped) as peer:
        slab.door.close()
        slab.view(HEADER_BYTES + 7, 1)[0] = 9

        assert os.listdir(tmp_path) == []
        assert peer.view(HEADER_BYTES + 7, 1)[0] == 9


async def test_a_slab_is_had_by_one_session_alone(
    tmp_path: Path, slab: SlabSegment, mapped: MappedSlabs
) -> None:
    """A peer that names it again would have its sealed spans overwritten; once given up it is anybody's."""
    first = await attach(tmp_path, slab.name, SIZE, mapped)
    with pytest.raises(SlabNotShared, match=r"slab\.memory: decode made it for this session"):
        await attach(tmp_path, slab.name, SIZE, mapped)
    assert mapped.statistics() == MappedStatistics(1, SIZE)

    first.close()
    (await attach(tmp_path, slab.name, SIZE, mapped)).close()


async def test_of_two_sessions_that_name_one_slab_at_once_one_has_it(
    tmp_path: Path, slab: SlabSegment, mapped: MappedSlabs
) -> None:
    """Threads map beside each other; what one has entered no other one enters."""
    ends = await asyncio.gather(
        *(attach(tmp_path, slab.name, SIZE, mapped) for _ in range(4)), return_exceptions=True
    )

    won = [end for end in ends if isinstance(end, SlabSegment)]
    assert (len(won), sum(isinstance(end, SlabNotShared) for end in ends)) == (1, 3)
    won[0].close()


async def test_a_slab_that_is_too_large_is_not_even_fetched(tmp_path: Path, mapped: MappedSlabs) -> None:
    """A Hello that names a terabyte costs nothing."""
    with pytest.raises(SlabNotShared, match=f"prefill takes {4 * SIZE} at most, see --max-slab-bytes"):
        await attach(tmp_path, NAME, 1 << 40, mapped)


async def test_descriptors_are_back_when_attach_is_refused(
    tmp_path: Path, slab: SlabSegment, mapped: MappedSlabs
) -> None:
    """A refused peer can try for ever."""
    before = num_descriptors()

    with pytest.raises(SlabNotShared, match=rf"slab\.size_bytes: decode {2 * SIZE}, prefill finds {SIZE}"):
        await attach(tmp_path, slab.name, 2 * SIZE, mapped)

    assert num_descriptors() == before


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (b"", "slab.header"),
        (SlabHeader(2 * SIZE, bytes(32), "boot-7").pack(), "slab.size_bytes"),
    ],
    ids=["none", "another size"],
)
async def test_memory_that_is_no_slab_of_this_size_is_refused(
    tmp_path: Path, mapped: MappedSlabs, header: bytes, field: str
) -> None:
    """Sealed memory of this user may be something else."""
    memory = make_memory("m", SIZE, header)
    door = SlabDoor(tmp_path, NAME, memory)
    door.serve(asyncio.get_running_loop())

    with pytest.raises(SlabNotShared) as caught:
        await attach(tmp_path, NAME, SIZE, mapped)

    assert caught.value.differences[0].field == field
    door.close()
    os.close(memory)


async def test_memory_that_cannot_be_written_is_refused(tmp_path: Path, mapped: MappedSlabs) -> None:
    """A descriptor for reading alone passes every look at the memory, and no mapping."""
    memory = make_memory("m", SIZE, SlabHeader(SIZE, bytes(32), "boot-7").pack())
    reader = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
    door = SlabDoor(tmp_path, NAME, reader)
    door.serve(asyncio.get_running_loop())

    with pytest.raises(SlabNotShared, match=r"slab\.mapping: .*cannot map it: Permission denied"):
        await attach(tmp_path, NAME, SIZE, mapped)

    door.close()
    os.close(reader)
    os.close(memory)


async def test_only_the_owner_hands_a_slab_over(
    tmp_path: Path, slab: SlabSegment, mapped: MappedSlabs
) -> None:
    """A peer has no door."""
    with await attach(tmp_path, slab.name, SIZE, mapped) as peer, pytest.raises(InvariantViolation):
        _ = peer.door


def test_the_maps_of_a_process_show_the_name_of_a_slab(tmp_path: Path) -> None:
    """Whoever looks there knows the session."""
    with SlabSegment.create(tmp_path, SIZE, "boot-7") as slab:
        assert f"/memfd:{slab.name} (deleted)" in Path("/proc/self/maps").read_text()
        assert slab.data == Range(HEADER_BYTES, SIZE)


def test_close_by_the_owner_ends_the_door(tmp_path: Path) -> None:
    """An owner that ends leaves no name, also when no peer ever came."""
    slab = SlabSegment.create(tmp_path, SIZE, "boot-7")

    slab.close()
    slab.close()

    assert (slab.is_closed, slab.is_unmapped) == (True, True)
    assert list(tmp_path.iterdir()) == []


def test_an_array_stays_valid_when_the_segment_is_closed(tmp_path: Path) -> None:
    """Memory is unmapped with its last user, so that a running copy never reads what is gone."""
    slab = SlabSegment.create(tmp_path, SIZE, "boot-7")
    array = np.frombuffer(slab.view(HEADER_BYTES, 64), np.uint8)
    array[3] = 8

    slab.close()

    assert (array[3], slab.is_unmapped) == (8, False)
    del array
    assert slab.is_unmapped


@pytest.mark.parametrize(
    ("offset", "length"),
    [(HEADER_BYTES - 1, 1), (0, 64), (SIZE, 1), (SIZE - 64, 65), (-64, 64), (HEADER_BYTES, -1)],
)
async def test_a_view_is_refused_when_it_leaves_the_data_area(
    slab: SlabSegment, offset: int, length: int
) -> None:
    """Nobody reaches the header or what lies behind the slab."""
    with pytest.raises(ValueError, match="are not all in"):
        slab.view(offset, length)


def test_a_view_is_refused_when_the_segment_is_closed(tmp_path: Path) -> None:
    """A closed segment gives no bytes."""
    slab = SlabSegment.create(tmp_path, SIZE, "boot-7")
    slab.close()

    with pytest.raises(ValueError, match="closed"):
        slab.view(HEADER_BYTES, 1)


def test_a_leak_warns_and_still_closes_the_door(tmp_path: Path) -> None:
    """A segment that nobody closed is a bug that shows."""
    leaked = [SlabSegment.create(tmp_path, SIZE, "boot-7")]

    with pytest.warns(ResourceWarning, match=leaked[0].name):
        leaked.clear()

    assert list(tmp_path.iterdir()) == []
