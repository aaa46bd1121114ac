"""The name of the socket of a slab, and how a socket file is reached without following what lies there.

Theory of operation: a name from a peer, or one that is found in a directory which others may write, is opened
as it is, without following a link, and from then on reached through its descriptor: what was examined is what
is connected to, and a path of any length fits into the address of a socket.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = re.compile(r"kvspan-[0-9a-f]{24}\.sock")
"""Of the socket of a slab."""

_RANDOM_BYTES = 12


def make_name(random_bytes: Callable[[int], bytes]) -> str:
    """Return a name that nobody else has."""
    return f"kvspan-{random_bytes(_RANDOM_BYTES).hex()}.sock"


@contextmanager
def opened_folder(directory: Path) -> Iterator[int]:
    """Yield a descriptor of a directory, for names in it."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_name(folder: int, name: str) -> Iterator[tuple[int, os.stat_result]]:
    """Yield a descriptor of what has the name, be it a link, and its status; nothing is read or woken."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield fd, os.fstat(fd)
    finally:
        os.close(fd)


def address_of(fd: int, name: str = "") -> str:
    """Return the address by which a socket is bound or connected to below a descriptor."""
    return f"/proc/self/fd/{fd}/{name}" if name else f"/proc/self/fd/{fd}"


def is_own_socket(status: os.stat_result) -> bool:
    """Tell whether it is a socket of this user; root takes those of others for what they are."""
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
