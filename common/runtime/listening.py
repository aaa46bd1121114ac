"""Whether this process can listen at an address, looked at before anything is loaded or bound.

Theory of operation: grpc replaces the socket file of whoever listens on it, and of a name with several
addresses it takes those that it can get; both in silence. So a name is resolved here, each of its addresses
is tried and then bound by its number, all with one port. `localhost` is both loopback addresses whatever the
hosts file says, since clients read it so; either wildcard is both. A path is examined: a socket that answers
is refused, one of this user that nobody answers is a left-over of a dead process and removed, anything else
is never touched.

Not here: how an address is written (`address.py`).
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.runtime.address import TCPAddress, UnixAddress

KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFREG: "a file", stat.S_IFLNK: "a link"}
"""What may stand where a socket should."""

ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What the kernel says of an address that no interface of this host has."""

LOOPBACK = ("127.0.0.1", "::1")

WILDCARDS = ("0.0.0.0", "::")

TRIES = 16
"""Of ports that the kernel chose for one address and that may be taken at another one."""

Target = tuple[socket.AddressFamily, Any]
"""A family and an address as sockets take it."""


def check_free(field: str, address: TCPAddress | UnixAddress) -> None:
    """Make sure that `address` can be listened at now; removes the socket of a dead process.

    Raises: `ConfigError` that says why not.
    """
    if isinstance(address, UnixAddress):
        claim_path(field, address)
    else:
        free_addresses(field, address)


def free_addresses(field: str, address: TCPAddress) -> tuple[TCPAddress, ...]:
    """Return all that `address` stands for on this host, by number and with one port; each is free.

    The port is 0 still when there is one address and the kernel may choose. An address that this host lacks
    is passed over: a container without IPv6 may name ::1 in its hosts file.

    Raises: `ConfigError` that names what is taken.
    """
    targets = _resolve(field, address)
    for _ in range(TRIES):
        found, failed = _try(targets, address.port)
        if not failed or address.port or failed[0][1].errno != errno.EADDRINUSE:
            break
    if failed:
        target, error = failed[0]
        of_which = "" if len(targets) == 1 else f" on {_numeric(target)}"
        raise ConfigError(field, address, f"cannot listen{of_which}: {error.strerror or error}") from error
    if targets[-1][1][0] in WILDCARDS:
        # At either one grpc listens on both.
        found = found[-1:]
    return found if len(found) > 1 else (TCPAddress(found[0].host, address.port),)


def claim_path(field: str, address: UnixAddress) -> None:
    """Make sure that `address` can be bound; removes the socket of a dead process.

    Raises: `ConfigError` when its directory is missing or not writable, or when the path belongs to a live
    process or another user, or is no socket.
    """
    path = address.path
    directory = path.parent
    try:
        is_there = directory.is_dir()
        found = path.lstat() if is_there else None
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise ConfigError(field, address, f"cannot look into {directory}: {error.strerror}") from error
    if not is_there:
        raise ConfigError(field, address, f"directory {directory} does not exist")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(field, address, f"directory {directory} is not writable")
    if found is not None:
        _remove_left_over(field, address, found)


def _remove_left_over(field: str, address: UnixAddress, found: os.stat_result) -> None:
    path = address.path
    if not stat.S_ISSOCK(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise ConfigError(field, address, f"the path is {kind}, not a socket; remove it or take another path")
    if found.st_uid != os.geteuid():
        problem = f"the socket belongs to user {found.st_uid}; remove it or take another path"
        raise ConfigError(field, address, problem)
    if (used := _socket_problem(path)) is not None:
        raise ConfigError(field, address, f"{used}; stop that process or take another path")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot remove the socket of a dead process: {error.strerror}"
        raise ConfigError(field, address, problem) from error


def _socket_problem(path: Path) -> str | None:
    """Return why a socket file may be in use; None when no process has it any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except BlockingIOError:
            return "another process listens on this socket"
        except OSError as error:
            # Another user's, or of another type: whoever has it may live.
            return f"another process may have this socket: {error.strerror}"
    return "another process listens on this socket"


def _resolve(field: str, address: TCPAddress) -> list[Target]:
    """Return what a host stands for, each address once, without a port."""
    host = address.host.strip("[]")
    hosts = [host]
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        hosts = list(LOOPBACK)
    targets = _look_up(field, address, hosts)
    if any(target[0] in WILDCARDS for _, target in targets):
        targets = _look_up(field, address, WILDCARDS)
    return targets


def _look_up(field: str, address: TCPAddress, hosts: Iterable[str]) -> list[Target]:
    found: dict[Target, None] = {}
    try:
        for host in hosts:
            for family, _, _, _, target in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
                found[family, target] = None
    except (OSError, UnicodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(field, address, f"{host!r} has no address: {problem}") from error
    return list(found)


def _try(targets: Sequence[Target], port: int) -> tuple[tuple[TCPAddress, ...], list[tuple[Target, OSError]]]:
    """Listen at all targets for a moment, with one port; return those that work, and those that are taken.

    All are held at once, so that a port that the kernel chose for the first is the port of each.
    """
    found: list[TCPAddress] = []
    failed: list[tuple[Target, OSError]] = []
    with ExitStack() as held:
        for target in targets:
            try:
                probe = held.enter_context(_listening(target, port))
            except OSError as error:
                failed.append((target, error))
                continue
            port = probe.getsockname()[1]
            found.append(TCPAddress(_numeric(target), port))
    return tuple(found), [one for one in failed if not found or one[1].errno not in ABSENT]


def _listening(target: Target, port: int) -> socket.socket:
    family, (host, _, *scope) = target
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # An IPv4 address in the form of an IPv6 one is taken by a socket of both alone.
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not host.startswith("::ffff:"))
        probe.bind((host, port, *scope))
        probe.listen(1)
    except OSError:
        probe.close()
        raise
    return probe


def _numeric(target: Target) -> str:
    """Return an address as it is written: IPv6 in brackets, with its interface if it needs one."""
    family, address = target
    host, _ = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return f"[{host}]" if family == socket.AF_INET6 else host
