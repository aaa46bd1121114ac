"""What prefill takes from a door that a peer named, and how long it waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import Difference, SlabNotShared
from common.slab.knock import knock

NAME = f"kvspan-{'05' * 12}.sock"
OTHER_UID = 4321

Say = Callable[[socket.socket], object]


@contextmanager
def listening(path: Path, say: Say) -> Iterator[socket.socket]:
    """Listen at a path and say something to whoever connects; no descriptor may be left in the end."""
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        has_ended = threading.Event()
        thread = threading.Thread(target=_serve, args=(listener, say, has_ended))
        thread.start()
        try:
            yield listener
        finally:
            has_ended.set()
            thread.join()
    assert len(os.listdir("/proc/self/fd")) == before


def _serve(listener: socket.socket, say: Say, has_ended: threading.Event) -> None:
    while not has_ended.is_set():
        if select.select([listener], [], [], 0.01)[0]:
            with listener.accept()[0] as connection, contextlib.suppress(BrokenPipeError):
                say(connection)


def hand(*fds: int) -> Say:
    """Hand over descriptors in one message."""
    return lambda connection: socket.send_fds(connection, [b"\0"], list(fds))


def refused(tmp_path: Path, name: str = NAME) -> Difference:
    """Return why a knock was in vain."""
    with pytest.raises(SlabNotShared) as caught:
        knock(tmp_path, name, limit_s=0.2)
    assert str(tmp_path) not in str(caught.value)
    (difference,) = caught.value.differences
    return difference


def test_one_descriptor_comes_of_which_no_child_hears(tmp_path: Path) -> None:
    """It is closed in whatever this process starts."""
    with listening(tmp_path / NAME, hand(0)):
        fd = knock(tmp_path, NAME)

        assert os.path.samestat(os.fstat(fd), os.fstat(0))
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "kvspan-05.sock",
        f"../kvspan-{'05' * 12}.sock",
        f"kvspan-{'0G' * 12}.sock",
        f"kvspan-{'05' * 12}.sock\n",
        f"kvspan-{'05' * 12}.sock.new",
    ],
)
def test_a_name_that_is_none_of_ours_is_not_looked_for(tmp_path: Path, name: str) -> None:
    """A name from the peer never leaves the slab directory, nor names what somebody else has there."""
    assert refused(tmp_path, name).field == "slab.socket"


def test_a_name_that_is_not_there_names_the_flag(tmp_path: Path) -> None:
    """The other side has another directory; neither path nor random name is told."""
    found = "cannot open it in --slab-dir: No such file or directory"

    assert refused(tmp_path) == Difference("slab.socket", "made one", found)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo], ids=["file", "folder", "fifo"])
def test_what_is_no_socket_is_not_opened(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """A FIFO cannot hold us up."""
    make(tmp_path / NAME)

    assert refused(tmp_path) == Difference("slab.socket", "made one", "finds no socket")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Not even to a socket that would do."""
    with listening(tmp_path / "true", hand(0)):
        (tmp_path / NAME).symlink_to("true")

        assert refused(tmp_path) == Difference("slab.socket", "made one", "finds no socket")


def test_a_socket_of_the_dead_refuses(tmp_path: Path) -> None:
    """As SIGKILL leaves it."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / NAME))

    assert refused(tmp_path).prefill_value == "cannot open it in --slab-dir: Connection refused"


def test_nobody_waits_for_one_who_says_nothing(tmp_path: Path) -> None:
    """A door that is not answered costs a bounded time."""
    gone = threading.Event()
    with listening(tmp_path / NAME, lambda _: gone.wait(10)):
        assert refused(tmp_path).prefill_value == "cannot open it in --slab-dir: no answer in time"
        gone.set()


@pytest.mark.parametrize("count", [0, 2, 8, 20])
def test_anything_but_one_descriptor_is_refused_and_closed(tmp_path: Path, count: int) -> None:
    """Nobody fills this process with descriptors, also not with more than are received."""
    with listening(tmp_path / NAME, hand(*[0] * count)):
        assert refused(tmp_path).field == "slab.memory"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes sockets for others")
@pytest.mark.parametrize("is_owner", [True, False], ids=["file", "process"])
def test_root_takes_nothing_of_another_user(tmp_path: Path, is_owner: bool) -> None:
    """Neither through a socket of theirs, nor from a process of theirs that listens at one of ours."""
    path = tmp_path / NAME
    with listening(path, hand(0)) as listener:
        if is_owner:
            os.chown(path, OTHER_UID, -1)
        else:
            os.seteuid(OTHER_UID)
            listener.listen(1)  # whom SO_PEERCRED names
            os.seteuid(0)

        assert refused(tmp_path) == Difference("slab.owner", f"uid {OTHER_UID}", "uid 0")
