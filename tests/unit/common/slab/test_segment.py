"""The shared-memory file of one session: making, mapping, checking and ending it."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError, Difference, InvariantViolation, SlabNotShared
from common.kv.ranges import Range
from common.slab.header import HEADER_BYTES
from common.slab.segment import SlabSegment

SIZE = 3 * HEADER_BYTES


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[SlabSegment]:
    """A slab of two pages of data, by its owner."""
    with SlabSegment.create(tmp_path, SIZE, "boot-7") as slab:
        yield slab


def _random(*values: int) -> Callable[[int], bytes]:
    """Return a source that gives each value once, repeated to the length asked for."""
    remaining = iter(values)
    return lambda length: bytes([next(remaining)]) * length


def _found(caught: pytest.ExceptionInfo[SlabNotShared]) -> tuple[str, str]:
    (difference,) = caught.value.differences
    return difference.field, difference.prefill_value


def test_create_makes_a_private_file_of_the_full_size(tmp_path: Path, slab: SlabSegment) -> None:
    """Only the user may open it, and every byte is reserved."""
    status = (tmp_path / slab.name).stat()

    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (status.st_size, status.st_blocks * 512 >= SIZE) == (SIZE, True)
    assert slab.data == Range(HEADER_BYTES, SIZE)


def test_two_pairs_have_their_own_slabs_in_one_directory(tmp_path: Path, slab: SlabSegment) -> None:
    """Names and nonces never collide, and one pair's bytes are not the other's (G5)."""
    with SlabSegment.create(tmp_path, SIZE, "boot-8") as other:
        slab.buffer[0] = 1
        other.buffer[0] = 2

        assert other.name != slab.name
        assert other.nonce != slab.nonce
        assert (slab.buffer[0], other.buffer[0]) == (1, 2)


def test_create_takes_another_name_when_the_name_exists(tmp_path: Path) -> None:
    """A file that is there already is never opened or changed (G9)."""
    taken = tmp_path / f"kvspan-{'05' * 12}.slab"
    taken.write_bytes(b"left over")

    with SlabSegment.create(tmp_path, SIZE, "boot-7", random_bytes=_random(1, 5, 6)) as slab:
        assert slab.name == f"kvspan-{'06' * 12}.slab"

    assert taken.read_bytes() == b"left over"


def test_create_gives_up_when_every_name_exists(tmp_path: Path) -> None:
    """A source of names that repeats itself is an error and no endless loop."""
    (tmp_path / f"kvspan-{'05' * 12}.slab").touch()

    with pytest.raises(ConfigError, match="no free name"):
        SlabSegment.create(tmp_path, SIZE, "boot-7", random_bytes=lambda length: b"\x05" * length)


def test_create_takes_another_name_when_a_sweeper_removed_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between open and lock a file looks dead; its creator notices that the name is gone."""
    lock = fcntl.flock
    swept: list[Path] = []

    def flock_after_a_sweep(fd: int, operation: int) -> None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_a_sweep)

    with SlabSegment.create(tmp_path, SIZE, "boot-7") as slab:
        assert [path.name for path in tmp_path.iterdir()] == [slab.name]
        assert swept[0].name != slab.name


@pytest.mark.parametrize("size_bytes", [0, HEADER_BYTES, SIZE + 1, -HEADER_BYTES])
def test_create_is_refused_when_the_size_is_not_whole_pages(tmp_path: Path, size_bytes: int) -> None:
    """A header page and at least one page of data."""
    with pytest.raises(ConfigError) as caught:
        SlabSegment.create(tmp_path, size_bytes, "boot-7")

    assert caught.value.field == "slab_bytes"
    assert list(tmp_path.iterdir()) == []


def test_create_is_refused_when_the_directory_is_missing(tmp_path: Path) -> None:
    """The error names the directory."""
    with pytest.raises(ConfigError, match="missing") as caught:
        SlabSegment.create(tmp_path / "missing", SIZE, "boot-7")

    assert caught.value.field == "slab_dir"


def test_create_leaves_no_file_and_no_descriptor_when_mapping_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A creation that fails leaves everything as it was."""

    def fails(mapping: object) -> None:
        raise OSError("no memory for page tables")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("common.slab.segment.populate", fails)

    with pytest.raises(OSError, match="page tables"):
        SlabSegment.create(tmp_path, SIZE, "boot-7")

    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_peer_sees_the_same_bytes_nonce_and_boot_id(tmp_path: Path, slab: SlabSegment) -> None:
    """The nonce read from the memory proves that both map the same file."""
    with SlabSegment.attach(tmp_path, slab.name, SIZE) as peer:
        peer.view(HEADER_BYTES + 64, 5)[:] = b"spans"

        assert (peer.nonce, peer.boot_id) == (slab.nonce, "boot-7")
        assert bytes(slab.buffer[64:69]) == b"spans"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "kvspan-05.slab",
        f"../kvspan-{'05' * 12}.slab",
        f"kvspan-{'0G' * 12}.slab",
        f"kvspan-{'05' * 12}.slab\n",
        f"kvspan-{'05' * 12}.slab/..",
    ],
)
def test_attach_is_refused_when_the_name_is_not_one_of_ours(tmp_path: Path, name: str) -> None:
    """A name from the peer never leaves the slab directory."""
    with pytest.raises(SlabNotShared) as caught:
        SlabSegment.attach(tmp_path, name, SIZE)

    assert _found(caught)[0] == "slab.name"


def test_attach_is_refused_when_the_file_is_missing(tmp_path: Path) -> None:
    """The other side mounts another directory: the error names the flag, and neither path nor random name."""
    path = tmp_path / f"kvspan-{'05' * 12}.slab"

    with pytest.raises(SlabNotShared) as caught:
        SlabSegment.attach(tmp_path, path.name, SIZE)

    (difference,) = caught.value.differences
    assert difference == Difference(
        "slab.name", "made it", "cannot open it in --slab-dir: No such file or directory"
    )


@pytest.mark.parametrize("told", [SIZE + HEADER_BYTES, SIZE - HEADER_BYTES, 0])
def test_attach_is_refused_when_the_size_differs(tmp_path: Path, slab: SlabSegment, told: int) -> None:
    """Mapping beyond the end of a file would be a bus error later."""
    with pytest.raises(SlabNotShared) as caught:
        SlabSegment.attach(tmp_path, slab.name, told)

    assert _found(caught) == ("slab.size_bytes", f"finds {SIZE}")
    assert caught.value.differences[0].decode_value == str(told)


def test_attach_is_refused_when_a_slab_of_the_same_name_has_another_size(tmp_path: Path) -> None:
    """What was told about an old slab is void for a new one of the same name (W16)."""
    with SlabSegment.create(tmp_path, SIZE, "boot-7", random_bytes=_random(1, 5)) as old:
        told_name, told_size, told_nonce = old.name, old.size_bytes, old.nonce

    with SlabSegment.create(tmp_path, 2 * SIZE, "boot-8", random_bytes=_random(2, 5)) as new:
        assert (new.name, new.nonce == told_nonce) == (told_name, False)
        with pytest.raises(SlabNotShared, match="size_bytes"):
            SlabSegment.attach(tmp_path, told_name, told_size)


def _symlink(path: Path) -> None:
    (path.parent / "target").write_bytes(bytes(SIZE))
    path.symlink_to("target")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (_symlink, "slab.name"),
        (Path.mkdir, "slab.name"),
        (os.mkfifo, "slab.name"),
        (lambda path: path.write_bytes(bytes(SIZE)), "slab.header"),
    ],
    ids=["symlink", "directory", "fifo", "zeros"],
)
def test_attach_is_refused_when_the_file_is_not_a_slab(
    tmp_path: Path, make: Callable[[Path], object], field: str
) -> None:
    """Links, directories, pipes and files without our magic are not mapped."""
    path = tmp_path / f"kvspan-{'05' * 12}.slab"
    make(path)

    with pytest.raises(SlabNotShared) as caught:
        SlabSegment.attach(tmp_path, path.name, SIZE)

    assert _found(caught)[0] == field
    assert str(tmp_path) not in str(caught.value)


def test_attach_is_refused_when_another_user_owns_the_file(
    tmp_path: Path, slab: SlabSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who could read and change the KV must be the user who runs both services."""
    monkeypatch.setattr(os, "geteuid", lambda: 4321)

    with pytest.raises(SlabNotShared) as caught:
        SlabSegment.attach(tmp_path, slab.name, SIZE)

    assert _found(caught) == ("slab.owner", "uid 4321")


def test_attach_is_refused_when_the_header_has_another_size(tmp_path: Path, slab: SlabSegment) -> None:
    """A file that was cut or grown after it was made is not trusted."""
    os.truncate(tmp_path / slab.name, 2 * SIZE)

    with pytest.raises(SlabNotShared) as caught:
        SlabSegment.attach(tmp_path, slab.name, 2 * SIZE)

    assert _found(caught) == ("slab.size_bytes", f"header says {SIZE}")


def test_both_mappings_stay_valid_when_the_name_is_unlinked(tmp_path: Path, slab: SlabSegment) -> None:
    """The name goes as soon as the peer has mapped the file; the memory goes with the last mapping."""
    with SlabSegment.attach(tmp_path, slab.name, SIZE) as peer:
        slab.unlink()
        slab.unlink()
        slab.buffer[7] = 9

        assert list(tmp_path.iterdir()) == []
        assert peer.buffer[7] == 9


def test_unlink_is_refused_when_a_peer_asks(tmp_path: Path, slab: SlabSegment) -> None:
    """Only the owner ends the name."""
    with SlabSegment.attach(tmp_path, slab.name, SIZE) as peer, pytest.raises(InvariantViolation):
        peer.unlink()

    assert (tmp_path / slab.name).exists()


def test_unlink_leaves_another_file_of_the_same_name(tmp_path: Path, slab: SlabSegment) -> None:
    """What somebody put in the place of our file is not ours to remove."""
    path = tmp_path / slab.name
    path.unlink()
    path.write_bytes(b"other")

    slab.unlink()

    assert path.read_bytes() == b"other"


def test_close_by_the_owner_removes_the_name(tmp_path: Path) -> None:
    """An owner that ends leaves no file, also when no peer ever came."""
    slab = SlabSegment.create(tmp_path, SIZE, "boot-7")

    slab.close()
    slab.close()

    assert (slab.is_closed, slab.is_unmapped) == (True, True)
    assert list(tmp_path.iterdir()) == []


def test_an_array_stays_valid_when_the_segment_is_closed(tmp_path: Path) -> None:
    """Memory is unmapped with its last user, so that a running copy never reads what is gone."""
    slab = SlabSegment.create(tmp_path, SIZE, "boot-7")
    array = np.frombuffer(slab.view(HEADER_BYTES + 64, 64), np.uint8)
    array[3] = 8

    slab.close()

    assert (array[3], slab.is_unmapped) == (8, False)
    del array
    assert slab.is_unmapped


def test_descriptors_are_back_when_both_mappings_end(tmp_path: Path) -> None:
    """A session that comes and goes leaves no descriptor."""
    before = len(os.listdir("/proc/self/fd"))

    with SlabSegment.create(tmp_path, SIZE, "boot-7") as slab, SlabSegment.attach(tmp_path, slab.name, SIZE):
        pass

    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_are_back_when_attach_is_refused(tmp_path: Path, slab: SlabSegment) -> None:
    """A refused peer can try for ever."""
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(SlabNotShared):
        SlabSegment.attach(tmp_path, slab.name, 2 * SIZE)

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("offset", "length"),
    [(HEADER_BYTES - 1, 1), (0, 64), (SIZE, 1), (SIZE - 64, 65), (-64, 64), (HEADER_BYTES, -1)],
)
def test_a_view_is_refused_when_it_leaves_the_data_area(slab: SlabSegment, offset: int, length: int) -> None:
    """Nobody reaches the header or what lies behind the slab."""
    with pytest.raises(ValueError, match="are not all in"):
        slab.view(offset, length)


def test_a_view_is_refused_when_the_segment_is_closed(tmp_path: Path) -> None:
    """A closed segment gives no bytes."""
    slab = SlabSegment.create(tmp_path, SIZE, "boot-7")
    slab.close()

    with pytest.raises(ValueError, match="closed"):
        slab.view(HEADER_BYTES, 1)


def test_offsets_of_views_count_from_the_start_of_the_file(slab: SlabSegment) -> None:
    """Byte 0 of the buffer is byte 4096 of the file."""
    slab.view(HEADER_BYTES + 5, 1)[0] = 6

    assert slab.buffer[5] == 6
    assert len(slab.buffer) == SIZE - HEADER_BYTES


def test_a_leak_warns_and_still_removes_the_file(tmp_path: Path) -> None:
    """A segment that nobody closed is a bug that shows."""
    leaked = [SlabSegment.create(tmp_path, SIZE, "boot-7")]

    with pytest.warns(ResourceWarning, match=leaked[0].name):
        leaked.clear()

    assert list(tmp_path.iterdir()) == []
