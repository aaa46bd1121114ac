"""Slabs over several processes: who may end, be killed or run out of space, and what is left then."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.slab.header import HEADER_BYTES
from common.slab.segment import SlabSegment, sweep

SIZE = 3 * HEADER_BYTES
PAGE = resource.getpagesize()
ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.multiprocess

_OWN = """
import sys
from pathlib import Path
from common.slab.segment import SlabSegment
slab = SlabSegment.create(Path(sys.argv[1]), int(sys.argv[2]), "boot-child")
if "unlink" in sys.argv:
    slab.unlink()
print(slab.name, flush=True)
sys.stdin.read()
slab.close()
"""

_ATTACH = """
import sys
from pathlib import Path
from common.slab.segment import SlabSegment
peer = SlabSegment.attach(Path(sys.argv[1]), sys.argv[3], int(sys.argv[2]))
peer.buffer[:4] = b"peer"
if "leak" not in sys.argv:
    peer.close()
"""

_LIMITED = """
import resource, sys
from pathlib import Path
from common.errors import ConfigError
from common.slab.segment import SlabSegment
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    SlabSegment.create(Path(sys.argv[1]), int(sys.argv[2]), "boot-child")
except ConfigError as error:
    print(error.field, error)
"""


def _command(code: str, directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, str(directory), str(SIZE), *arguments]


@contextmanager
def _owner(directory: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run another process that owns a slab; yield it and the slab's name."""
    command = _command(_OWN, directory, *arguments)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        if process.poll() is None:
            process.communicate("")


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("ending", ["close", "leak"])
def test_the_slab_stays_when_an_attached_process_exits(tmp_path: Path, ending: str) -> None:
    """A peer that ends, tidily or not, takes nothing from the owner (G1)."""
    with SlabSegment.create(tmp_path, SIZE, "boot-7") as slab:
        subprocess.run(
            _command(_ATTACH, tmp_path, slab.name, ending), check=True, capture_output=True, cwd=ROOT
        )

        assert (tmp_path / slab.name).stat().st_size == SIZE
        assert bytes(slab.buffer[:4]) == b"peer"
        with SlabSegment.attach(tmp_path, slab.name, SIZE) as again:
            assert again.nonce == slab.nonce


def test_sweep_leaves_the_slab_of_a_living_process(tmp_path: Path) -> None:
    """Whoever holds the lock is alive, in whatever namespace."""
    with _owner(tmp_path) as (_, name):
        assert sweep(tmp_path) == ()
        assert (tmp_path / name).exists()


def test_sweep_removes_the_slab_of_a_killed_process(tmp_path: Path) -> None:
    """SIGKILL before the unlink leaves a file, and the next start removes it."""
    with _owner(tmp_path) as (process, name):
        _kill(process)
        assert (tmp_path / name).exists()

        assert sweep(tmp_path) == (name,)

    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_only_the_dead_among_many(tmp_path: Path) -> None:
    """One pass tells the dead from the living of several pairs (G5, G9)."""
    with _owner(tmp_path) as (dead, dead_name), SlabSegment.create(tmp_path, SIZE, "boot-7") as living:
        _kill(dead)

        assert sweep(tmp_path) == (dead_name,)
        assert [path.name for path in tmp_path.iterdir()] == [living.name]


def test_a_dead_slab_cannot_be_taken_for_the_new_one(tmp_path: Path) -> None:
    """Left-overs of the last run have another name, nonce and boot id (G9)."""
    with _owner(tmp_path) as (process, name):
        _kill(process)

    with (
        SlabSegment.create(tmp_path, SIZE, "boot-7") as slab,
        SlabSegment.attach(tmp_path, name, SIZE) as stale,
    ):
        assert stale.name != slab.name
        assert stale.nonce != slab.nonce
        assert stale.boot_id == "boot-child"


def test_no_file_is_left_when_the_owner_is_killed_after_the_unlink(tmp_path: Path) -> None:
    """After the peer has mapped the slab there is no name that a crash could leave."""
    with _owner(tmp_path, "unlink") as (process, name):
        _kill(process)

    assert name.startswith("kvspan-")
    assert list(tmp_path.iterdir()) == []


def test_sweep_leaves_what_is_not_a_slab(tmp_path: Path) -> None:
    """Other names, links, directories and pipes are never touched, whatever they are called."""
    (tmp_path / "kvspan-notes.txt").touch()
    (tmp_path / f"kvspan-{'0a' * 12}.slab").mkdir()
    (tmp_path / f"kvspan-{'0b' * 12}.slab").symlink_to("kvspan-notes.txt")
    os.mkfifo(tmp_path / f"kvspan-{'0c' * 12}.slab")

    assert sweep(tmp_path) == ()
    assert len(list(tmp_path.iterdir())) == 4


def test_sweep_is_refused_when_the_directory_is_missing(tmp_path: Path) -> None:
    """A wrong directory shows at start, by name."""
    with pytest.raises(ConfigError, match="missing"):
        sweep(tmp_path / "missing")


def test_create_is_refused_when_files_are_limited_below_the_size(tmp_path: Path) -> None:
    """The limit of the process is an error with the numbers and no signal."""
    done = subprocess.run(_command(_LIMITED, tmp_path), check=True, capture_output=True, text=True, cwd=ROOT)

    assert done.stdout.startswith(f"slab_bytes slab_bytes={SIZE}: ")
    assert "bytes free" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 4 pages."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={4 * PAGE}", "tmpfs", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_create_is_refused_when_the_mount_is_smaller_than_the_slab(small_mount: Path) -> None:
    """A small /dev/shm of a container is an error at start with both numbers, not a bus error later (G5)."""
    with pytest.raises(ConfigError, match=f"{4 * PAGE} bytes free") as caught:
        SlabSegment.create(small_mount, 5 * PAGE, "boot-7")

    assert (caught.value.field, caught.value.value) == ("slab_bytes", 5 * PAGE)
    assert list(small_mount.iterdir()) == []


def test_every_byte_can_be_written_when_create_succeeded_on_a_small_mount(small_mount: Path) -> None:
    """What was reserved is there, also when the rest of the mount fills up."""
    with SlabSegment.create(small_mount, 3 * PAGE, "boot-7") as slab:
        with pytest.raises(OSError, match="No space"):
            (small_mount / "filler").write_bytes(bytes(2 * PAGE))

        slab.buffer[:] = b"\x07" * len(slab.buffer)

        assert slab.buffer[-1] == 7
