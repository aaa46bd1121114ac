"""The look for leaks finds each kind of leak, and nothing where there is none."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.leaks import assert_no_leak, take_census


def test_nothing_is_found_when_everything_was_given_back(slab_dir: Path) -> None:
    """What was opened and closed again is no leak."""
    before = take_census(slab_dir)

    with (slab_dir / "slab").open("w"):
        pass
    (slab_dir / "slab").unlink()

    assert_no_leak(before, slab_dir)


def leave_a_file(slab_dir: Path) -> Callable[[], None]:
    """Leave a slab socket."""
    (slab_dir / "slab").touch()
    return (slab_dir / "slab").unlink


def leave_a_descriptor(slab_dir: Path) -> Callable[[], None]:
    """Leave an open file."""
    return (slab_dir.parent / "open").open("w").close


def leave_a_thread(slab_dir: Path) -> Callable[[], None]:
    """Leave a thread that waits."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left")
    thread.start()

    def stop() -> None:
        end.set()
        thread.join()

    return stop


def leave_a_child(slab_dir: Path) -> Callable[[], None]:
    """Leave a child process that reads its stdin."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def stop() -> None:
        with child:
            child.kill()

    return stop


@pytest.mark.parametrize(
    ("leave", "kind"),
    [
        (leave_a_file, "slab sockets: slab"),
        (leave_a_descriptor, "descriptors: "),
        (leave_a_thread, "threads: left"),
        (leave_a_child, "children: "),
    ],
)
def test_each_kind_of_leak_is_named(
    leave: Callable[[Path], Callable[[], None]], kind: str, slab_dir: Path
) -> None:
    """A leak fails the test and says what was left."""
    before = take_census(slab_dir)
    give_back = leave(slab_dir)

    try:
        with pytest.raises(AssertionError, match=kind):
            assert_no_leak(before, slab_dir)
    finally:
        give_back()

    assert_no_leak(before, slab_dir)


def test_a_descriptor_in_the_place_of_another_of_its_kind_is_no_leak(slab_dir: Path) -> None:
    """A connection that was closed and opened again has another number and another socket."""
    before_ends = socket.socketpair()
    before = take_census(slab_dir)

    after_ends = socket.socketpair()
    for end in before_ends:
        end.close()

    assert_no_leak(before, slab_dir)
    for end in after_ends:
        end.close()
