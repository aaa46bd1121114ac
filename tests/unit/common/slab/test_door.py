"""The door of a slab: who is handed what, what its name lets others do, and which names are left over."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.slab.door import BACKLOG, SlabDoor, sweep
from common.slab.knock import knock

NAME = f"kvspan-{'05' * 12}.sock"
OTHER_UID = 4321
ROOT = Path(__file__).parents[4]


@pytest.fixture
def memory() -> Iterator[int]:
    """A descriptor of something; a door does not look."""
    fd = os.memfd_create("memory")
    yield fd
    os.close(fd)


@pytest.fixture
def door(tmp_path: Path, memory: int) -> Iterator[SlabDoor]:
    """A door in a folder of its own that nobody serves yet."""
    door = SlabDoor(tmp_path, NAME, memory)
    yield door
    door.close()
    door.close()


def connected(path: Path) -> socket.socket:
    """Return a connection to a door."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def received(connection: socket.socket) -> tuple[int, ...]:
    """Return the inodes of what a door handed over."""
    with connection:
        _, fds, _, _ = socket.recv_fds(connection, 1, 4)
    inodes = tuple(os.fstat(fd).st_ino for fd in fds)
    for fd in fds:
        os.close(fd)
    return inodes


async def test_whoever_knocks_gets_the_memory(tmp_path: Path, door: SlabDoor, memory: int) -> None:
    """From the first instant of its name on, though the loop gets to it later."""
    fetching = asyncio.create_task(asyncio.to_thread(knock, tmp_path, NAME))
    door.serve(asyncio.get_running_loop())

    fd = await fetching

    assert os.path.samestat(os.fstat(fd), os.fstat(memory))
    os.close(fd)


def test_one_who_says_nothing_and_takes_nothing_holds_nobody_up(
    tmp_path: Path, door: SlabDoor, memory: int
) -> None:
    """Nothing is read, and a message that nobody takes is written at once."""
    silent = [connected(tmp_path / NAME) for _ in range(BACKLOG - 1)]
    last = connected(tmp_path / NAME)

    door.answer()

    assert received(last) == (os.fstat(memory).st_ino,)
    for connection in silent:
        connection.close()


def test_one_who_left_before_the_answer_is_passed_over(tmp_path: Path, door: SlabDoor, memory: int) -> None:
    """The next one is served."""
    connected(tmp_path / NAME).close()
    last = connected(tmp_path / NAME)

    door.answer()

    assert received(last) == (os.fstat(memory).st_ino,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_another_user_gets_nothing(memory: int) -> None:
    """Whatever the mode of the socket and its folder came to be."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        door = SlabDoor(Path(folder), NAME, memory)
        os.chmod(f"{folder}/{NAME}", 0o666)
        os.seteuid(OTHER_UID)
        try:
            stranger = connected(Path(folder, NAME))
        finally:
            os.seteuid(0)

        door.answer()
        door.close()

    assert received(stranger) == ()


@pytest.mark.parametrize("umask", [0, 0o277])
def test_only_its_user_may_connect(tmp_path: Path, memory: int, umask: int) -> None:
    """Whatever the umask is; there is no moment in which others may, since the socket had the mode before."""
    before = os.umask(umask)
    try:
        door = SlabDoor(tmp_path, NAME, memory)
    finally:
        os.umask(before)

    status = (tmp_path / NAME).lstat()
    assert (stat.S_ISSOCK(status.st_mode), stat.S_IMODE(status.st_mode)) == (True, 0o600)
    door.close()


def test_a_long_folder_is_no_obstacle(tmp_path: Path, memory: int) -> None:
    """Addresses of sockets end at 108 bytes, paths do not."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    door = SlabDoor(folder, NAME, memory)

    assert [path.name for path in folder.iterdir()] == [NAME]
    assert sweep(folder) == ()
    door.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, memory: int) -> None:
    """By its flag, with the reason; nothing is kept."""
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(ConfigError, match=r"slab_dir=.*/missing: No such file or directory"):
        SlabDoor(tmp_path / "missing", NAME, memory)

    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_left_of_a_door_that_is_closed(tmp_path: Path, memory: int) -> None:
    """Neither a name nor a descriptor; who comes now is refused."""
    before = len(os.listdir("/proc/self/fd"))
    door = SlabDoor(tmp_path, NAME, memory)
    waiting = connected(tmp_path / NAME)

    door.close()

    assert list(tmp_path.iterdir()) == []
    with waiting, pytest.raises(ConnectionResetError):
        waiting.recv(1)
    waiting.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_door_that_is_closed_leaves_another_file_of_its_name(tmp_path: Path, door: SlabDoor) -> None:
    """What somebody put in its place is not ours to remove."""
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).write_text("other")

    door.close()

    assert (tmp_path / NAME).read_text() == "other"


def test_a_door_is_closed_when_there_are_no_descriptors_left(tmp_path: Path, door: SlabDoor) -> None:
    """A connection that cannot be taken would wake the loop for ever; the session is tried again."""
    waiting = connected(tmp_path / NAME)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        door.answer()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert list(tmp_path.iterdir()) == []
    waiting.close()


_OWN = """
import os, sys
from pathlib import Path
from common.slab.door import SlabDoor
door = SlabDoor(Path(sys.argv[1]), sys.argv[2], os.memfd_create("memory"))
print("listening", flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """Run another process that has a door, and kill it in the end."""
    command = [sys.executable, "-c", _OWN, str(folder), name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield process
        process.send_signal(signal.SIGKILL)


@pytest.mark.multiprocess
def test_sweep_removes_what_a_killed_process_left_and_nothing_that_lives(
    tmp_path: Path, door: SlabDoor
) -> None:
    """One pass tells the dead from the living of several pairs (G5, G9), in whatever namespace."""
    dead = f"kvspan-{'06' * 12}.sock"
    with owner(tmp_path, dead):
        assert sweep(tmp_path) == ()

    assert sweep(tmp_path) == (dead,)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_sweep_does_not_wake_a_door(tmp_path: Path, door: SlabDoor) -> None:
    """Or whoever looks around would be handed every slab of its user."""
    waiting = connected(tmp_path / NAME)

    assert sweep(tmp_path) == ()

    door.answer()
    assert len(received(waiting)) == 1


def dead_socket(path: Path) -> Path:
    """Leave a socket to which nobody listens."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


def test_sweep_leaves_what_is_no_socket_of_a_slab(tmp_path: Path) -> None:
    """Other names, files, links, folders and FIFOs are never touched, whatever they are called."""
    dead_socket(tmp_path / "prefill.sock")
    (tmp_path / f"kvspan-{'0a' * 12}.sock").mkdir()
    (tmp_path / f"kvspan-{'0b' * 12}.sock").symlink_to("prefill.sock")
    os.mkfifo(tmp_path / f"kvspan-{'0c' * 12}.sock")
    (tmp_path / f"kvspan-{'0d' * 12}.sock").touch()

    assert sweep(tmp_path) == ()
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes sockets for others")
def test_sweep_leaves_the_socket_of_another_user(tmp_path: Path) -> None:
    """Root does not clean up after others."""
    os.chown(dead_socket(tmp_path / NAME), OTHER_UID, -1)

    assert sweep(tmp_path) == ()


@pytest.mark.parametrize(("age_s", "swept"), [(0, 0), (120, 1)])
def test_half_a_name_is_swept_once_nobody_can_be_making_it(tmp_path: Path, age_s: int, swept: int) -> None:
    """Between its first instant and its listening a socket looks dead."""
    path = dead_socket(tmp_path / f"{NAME}.new")
    made_s = path.lstat().st_mtime - age_s
    os.utime(path, (made_s, made_s))

    assert len(sweep(tmp_path)) == swept


def test_sweep_is_refused_when_the_folder_is_missing(tmp_path: Path) -> None:
    """A wrong directory shows at start, by name."""
    with pytest.raises(ConfigError, match="missing"):
        sweep(tmp_path / "missing")
