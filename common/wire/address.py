"""Where a service listens and how it is reached: `host:port` or `unix:PATH`.

Theory of operation: grpc replaces the socket file of whoever listens on it and says only "failed to bind".
So a path is examined first: a socket that answers is refused, one that nobody answers is a left-over of a
dead process and removed, anything else is never touched.
"""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

UNIX_PREFIX = "unix:"

MAX_PATH_BYTES = 107
"""Longest path of a unix socket on Linux, without the closing zero byte."""

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class TCPAddress:
    """A host and a port; port 0 lets the kernel choose when listening."""

    host: str
    """Name or address, an IPv6 address in brackets."""

    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a unix socket."""

    path: Path

    def __str__(self) -> str:
        return f"{UNIX_PREFIX}{self.path}"


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
        raise ConfigError(field, address, "the path exists and is not a socket")
    if _is_answered(path):
        raise ConfigError(field, address, "another process listens on this socket")
    path.unlink(missing_ok=True)


def bind_problem(address: TCPAddress) -> str:
    """Return why the kernel does not let this process listen on `address`."""
    host = address.host.strip("[]")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        return f"cannot listen: {error.strerror or error}"
    return "cannot listen: taken while this service started"


def _parse_path(field: str, text: str) -> Path:
    path = text.removeprefix(UNIX_PREFIX)
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path or "\0" in path:
        raise ConfigError(field, text, "needs a path after unix:")
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(field, text, f"the path has {size} bytes, the limit is {MAX_PATH_BYTES}")
    return Path(path)


def _is_answered(path: Path) -> bool:
    """Tell whether a process accepts connections on a socket file; unknown counts as yes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
