"""Decode's end of the hand-over: a unix socket at which the descriptor of a slab is given to one's own user.

Theory of operation: a door listens in the slab directory from before the Hello that names it until the
Welcome, or the end of the session. Whoever connects is looked at by the kernel (SO_PEERCRED): this very user
gets one byte and the descriptor, anybody else nothing. Nothing is ever read, so nobody can keep a door
waiting; a few are answered in one turn of the loop, the others wait in the backlog.

A name is made in two steps, so that whoever finds it finds somebody listening: the socket is bound to
NAME.new with mode 0600 from its first instant, listens, and is renamed. A socket that nobody listens to is
therefore left over, by SIGKILL, and removed by `sweep`; half a name only when it is too old to become one.

Ownership: one per slab, made on any thread, served and closed on the event loop.
Not here: what prefill believes of all this (`knock.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import time
from pathlib import Path

from common.errors import ConfigError
from common.slab.socket_file import NAME, address_of, is_own_socket, opened_folder, opened_name

BACKLOG = 8
"""Connections that wait at a door, and that are answered in one turn: one is expected."""

HANDED = b"\0"
"""What goes with the descriptor, which cannot cross alone."""

_MODE = 0o600

_HALF = ".new"
_HALF_LIFE_S = 60.0
"""Age of half a name that nobody is making any more: it takes microseconds."""

_CREDENTIALS = struct.Struct("3i")


class SlabDoor:
    """Where the descriptor of one slab can be had, until closed."""

    def __init__(self, directory: Path, name: str, memory: int) -> None:
        """Listen at `name` in `directory`; keeps a descriptor of `memory` of its own.

        Raises: `ConfigError` when that is not possible; nothing is left.
        """
        with contextlib.ExitStack() as parts:
            try:
                self._listener = _listen(directory, name, parts)
                self._memory = os.dup(memory)
                parts.callback(os.close, self._memory)
            except OSError as error:
                raise ConfigError("slab_dir", directory, error.strerror or str(error)) from error
            self._parts = parts.pop_all()
            # Invariant: ends what this holds, the name included; empty once closed.

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer whoever knocks from now on."""
        loop.add_reader(self._listener, self.answer)
        self._parts.callback(loop.remove_reader, self._listener)

    def answer(self) -> None:
        """Answer those who wait; never waits itself. A door that cannot be answered any more is closed."""
        try:
            for _ in range(BACKLOG):
                peer, _ = self._listener.accept()
                with peer:
                    self._hand(peer)
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError:
            # Out of descriptors, for one: it would wake the loop for ever.
            self.close()

    def close(self) -> None:
        """Take the name away and hand nothing more. Does nothing when closed before."""
        self._parts.close()

    def _hand(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        # One who has left, or whose descriptors are used up, comes again with another session.
        with contextlib.suppress(OSError):
            if peer_uid(peer) == os.geteuid():
                socket.send_fds(peer, [HANDED], [self._memory])


def peer_uid(connected: socket.socket) -> int:
    """Return who has the other end, as the kernel says; root has no pass."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def sweep(directory: Path) -> tuple[str, ...]:
    """Remove the sockets of slabs in `directory` that dead processes left; return their names.

    Never touches one that somebody listens to or another user made, another name, or what is no socket.

    Raises: `ConfigError` when the directory cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if NAME.fullmatch(name.removesuffix(_HALF)))
        with opened_folder(directory) as folder:
            return tuple(name for name in names if _remove_if_dead(folder, name))
    except OSError as error:
        raise ConfigError("slab_dir", directory, error.strerror or str(error)) from error


def _listen(directory: Path, name: str, parts: contextlib.ExitStack) -> socket.socket:
    """Return a socket that listens at `name`; `parts` ends it, and its name."""
    half = name + _HALF
    folder = parts.enter_context(opened_folder(directory))
    listener = parts.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.setblocking(False)
    # The file takes its mode from the socket: there is no instant in which others may connect.
    os.fchmod(listener.fileno(), _MODE)
    listener.bind(address_of(folder, half))
    with opened_name(folder, half) as (fd, status):
        inode = status.st_dev, status.st_ino
        parts.callback(_unlink_if_same, folder, half, inode)
        # The umask may have taken even our own right to connect.
        os.chmod(address_of(fd), _MODE)
        listener.listen(BACKLOG)
    parts.callback(_unlink_if_same, folder, name, inode)
    os.rename(half, name, src_dir_fd=folder, dst_dir_fd=folder)
    return listener


def _remove_if_dead(folder: int, name: str) -> bool:
    try:
        with opened_name(folder, name) as (fd, status):
            is_young = name.endswith(_HALF) and time.time() - status.st_mtime < _HALF_LIFE_S
            if is_young or not is_own_socket(status) or not _is_dead(fd):
                return False
            return _unlink_if_same(folder, name, (status.st_dev, status.st_ino))
    except OSError:
        # It has just gone, or this user may not look or remove.
        return False


def _is_dead(fd: int) -> bool:
    # A socket of another kind is refused by a living door with another error, and does not wake it.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(address_of(fd)) == errno.ECONNREFUSED


def _unlink_if_same(folder: int, name: str, inode: tuple[int, int]) -> bool:
    """Remove the name when it still is that file; tell whether it was."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    if (status.st_dev, status.st_ino) != inode:
        return False
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True
