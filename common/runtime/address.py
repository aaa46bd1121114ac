"""Where a service listens and how it is reached: `host:port` or `unix:PATH`.

Theory of operation: an address is read alike by whoever listens at it and whoever connects. What the two
sides of grpc, or a library and the operator, would read in two ways is refused with the reason: a number that
is no whole IPv4 address, a path with a comma, what would break the line that tells the address.

Not here: whether an address is free on this host (`listening.py`).
"""

from __future__ import annotations

import ipaddress
import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from common.errors import ConfigError

UNIX_PREFIX = "unix:"

MAX_PATH_BYTES = 107
"""Longest path of a unix socket on Linux, without the closing zero byte."""

MAX_PORT = 65535

_NAME = re.compile(r"[\w.-]+")
"""Of a host; the library would take other characters for parts of a URI."""

_NUMERIC = re.compile(r"(\d+|0[xX][0-9a-fA-F]*)\.?")
"""Last part of what the system takes for an IPv4 address, such as 127.1, and clients do not."""

_BREAKING = frozenset({"Cc", "Zl", "Zp"})
"""Categories of characters that end a line or steer a terminal."""


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
        """Return the address as grpc reads it, which decodes what follows the `%` of an interface."""
        return str(self).replace("%", "%25")


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
    host, _, port = text.rpartition(":")
    if not _is_host(host) or not (port.isascii() and port.isdecimal()):
        raise ConfigError(field, text, "must be host:port or unix:PATH, an IPv6 host in brackets")
    if len(port) > len(str(MAX_PORT)) or int(port) > MAX_PORT:
        raise ConfigError(field, text, f"port must be in [0, {MAX_PORT}]")
    if _NUMERIC.fullmatch(host.rpartition(".")[2]) and not _is_ip(ipaddress.IPv4Address, host):
        raise ConfigError(field, text, "the host is a number, and no IPv4 address in full")
    return TCPAddress(host, int(port))


def _is_host(text: str) -> bool:
    """Tell whether a text can be a name or an address; what is in brackets is IPv6."""
    if text.startswith("["):
        return text.endswith("]") and _is_ip(ipaddress.IPv6Address, text[1:-1])
    return _NAME.fullmatch(text) is not None


def _is_ip(kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _parse_path(field: str, text: str) -> Path:
    path = text.removeprefix(UNIX_PREFIX)
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path:
        raise ConfigError(field, text, "needs a path after unix:")
    if any(unicodedata.category(character) in _BREAKING for character in path):
        problem = "the path must have no control characters or line breaks: it is told in one line"
        raise ConfigError(field, text, problem)
    if "," in path:
        raise ConfigError(field, text, "the path must have no comma: clients would take it for two addresses")
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(field, text, f"the path has {size} bytes, the limit is {MAX_PATH_BYTES}")
    return Path(path)
