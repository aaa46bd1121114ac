"""Where a service listens and how it is reached: `host:port` or `unix:PATH`.

Theory of operation: grpc replaces the socket file of whoever listens on it and says only "failed to bind".
So a path is examined first: a socket that answers is refused, one that nobody answers is a left-over of a
dead process and removed, anything else is never touched.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.errors import ConfigError

UNIX_PREFIX = "unix:"

MAX_PATH_BYTES = 107
"""Longest path of a unix socket on Linux, without the closing zero byte."""

MAX_PORT = 65535

KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFREG: "a file", stat.S_IFLNK: "a link"}
"""What may stand where a socket should."""

ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What the kernel says of an address that no interface of this host has."""


@dataclass(frozen=True, slots=True)
class TCPAddress:
    """A host and a port; port 0 lets the kernel choose when listening."""

    host: str
    """Name or address, an IPv6 address in brackets."""

    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def uri(self) -> str:
        """Return the address as grpc reads it."""
        return str(self)


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a unix socket."""

    path: Path

    def __str__(self) -> str:
        return f"{UNIX_PREFIX}{self.path}"

    @property
    def uri(self) -> str:
        """Return the address as grpc reads it, which cuts a path at `#` and `?` and decodes `%20`."""
        return f"{UNIX_PREFIX}{quote(os.fsencode(self.path))}"


def parse_address(field: str, text: str) -> TCPAddress | UnixAddress:
    """Return the address in `text`; `field` names the flag it came from.

    Raises: `ConfigError` when it is neither `host:port` nor `unix:PATH`.
    """
    if text.startswith(UNIX_PREFIX):
        return UnixAddress(_parse_path(field, text))
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (host and colon and port.isdecimal()) or (":" in host and not bracketed) or "/" in host:
        raise ConfigError(field, text, "must be host:port or unix:PATH, an IPv6 host in brackets")
    if int(port) > MAX_PORT:
        raise ConfigError(field, text, f"port must be in [0, {MAX_PORT}]")
    return TCPAddress(host, int(port))


def check_free(field: str, address: TCPAddress | UnixAddress) -> None:
    """Make sure that `address` can be listened at now; removes the socket of a dead process.

    Raises: `ConfigError` that says why not.
    """
    if isinstance(address, UnixAddress):
        claim_path(field, address)
    elif problem := bind_problem(address):
        raise ConfigError(field, address, f"cannot listen: {problem}")


def claim_path(field: str, address: UnixAddress) -> None:
    """Make sure that `address` can be bound; removes the socket of a dead process.

    Raises: `ConfigError` when its directory is missing or not writable, or when the path belongs to a live
    process or is no socket.
    """
    path = address.path
    directory = path.parent
    if not directory.is_dir():
        raise ConfigError(field, address, f"directory {directory} does not exist")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(field, address, f"directory {directory} is not writable")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "a device")
        raise ConfigError(field, address, f"the path is {kind}, not a socket; remove it or take another path")
    if (problem := _socket_problem(path)) is not None:
        raise ConfigError(field, address, f"{problem}; stop that process or take another path")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot remove the socket of a dead process: {error.strerror}"
        raise ConfigError(field, address, problem) from error


def bind_problem(address: TCPAddress) -> str | None:
    """Return why the kernel does not let this process listen on `address`; None when it does.

    A name may have several addresses, `localhost` has two: grpc is content with one of them, and a service
    would be hidden behind another one that has the others. An address that this host lacks is passed over.
    """
    host = address.host.strip("[]")
    try:
        found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        return f"{host!r} has no address: {getattr(error, 'strerror', None) or error}"
    problems = [_bind_error(family, target) for family, _, _, _, target in found]
    fatal = [error for error in problems if error and error.errno not in ABSENT]
    if not fatal and all(problems):
        fatal = [error for error in problems if error]
    return (fatal[0].strerror or str(fatal[0])) if fatal else None


def _bind_error(family: int, target: Any) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _parse_path(field: str, text: str) -> Path:
    path = text.removeprefix(UNIX_PREFIX)
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path or "\0" in path:
        raise ConfigError(field, text, "needs a path after unix:")
    if "," in path:
        raise ConfigError(field, text, "the path must have no comma: clients would take it for two addresses")
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(field, text, f"the path has {size} bytes, the limit is {MAX_PATH_BYTES}")
    return Path(path)


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
