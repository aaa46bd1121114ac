"""Prefill's end of the hand-over: fetches the descriptor of a slab from a door that a peer named.

Theory of operation: the name is a stranger's word and the directory may be writable by others. So what has
the name must be a socket of this user, and whoever listens there must be this user (SO_PEERCRED: the kernel's
word of the moment it began to listen); root makes no exception. What then comes is one descriptor within a
bounded time, or nothing is taken. Blocking: for a thread of its own.

Not here: what the descriptor is of (`sealed_memory.py`).
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from common.excerpt import excerpt
from common.slab.door import peer_uid
from common.slab.refusal import not_shared
from common.slab.socket_file import NAME, address_of, opened_folder, opened_name

LIMIT_S = 3.0
"""How long a door may take to answer; decode waits ten seconds for all of the handshake."""

_DESCRIPTOR = struct.Struct("i")

_MAX_DESCRIPTORS = 8
"""So many are received, to be closed, beside the one that is expected; the kernel closes what is beyond."""


def knock(directory: Path, name: str, limit_s: float = LIMIT_S) -> int:
    """Return the descriptor that the door `name` in `directory` hands over; the caller closes it.

    Raises: `SlabNotShared` with what decode did and what was found; nothing is kept.
    """
    if not NAME.fullmatch(name):
        raise not_shared("slab.socket", excerpt(repr(name)), f"takes names like {NAME.pattern}")
    try:
        with opened_folder(directory) as folder, opened_name(folder, name) as (fd, status):
            if not stat.S_ISSOCK(status.st_mode):
                raise not_shared("slab.socket", "made one", "finds no socket")
            _require_own(status.st_uid)
            with _connected(address_of(fd), limit_s) as connection:
                _require_own(peer_uid(connection))
                return _receive(connection)
    except OSError as error:
        found = f"cannot open it in --slab-dir: {error.strerror or 'no answer in time'}"
        raise not_shared("slab.socket", "made one", found) from error


def _require_own(uid: int) -> None:
    if uid != os.geteuid():
        raise not_shared("slab.owner", f"uid {uid}", f"uid {os.geteuid()}")


def _connected(address: str, limit_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(limit_s)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket) -> int:
    """Return the one descriptor of the one message."""
    # Not `socket.recv_fds`, which passes its flags over: a child would inherit what comes.
    room = socket.CMSG_LEN(_MAX_DESCRIPTORS * _DESCRIPTOR.size)
    _, parts, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    fds = [
        fd
        for level, kind, data in parts
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _DESCRIPTOR.iter_unpack(data)
    ]
    if len(fds) == 1 and not flags & socket.MSG_CTRUNC:
        return int(fds[0])
    for fd in fds:
        os.close(fd)
    raise not_shared("slab.memory", f"handed over {len(fds)} descriptors", "takes one")
