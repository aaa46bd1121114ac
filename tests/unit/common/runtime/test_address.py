"""Rules of addresses and of the paths of unix sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.runtime.address import (
    MAX_PATH_BYTES,
    TCPAddress,
    UnixAddress,
    bind_problem,
    claim_path,
    parse_address,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", TCPAddress("127.0.0.1", 0)),
        ("decode:50061", TCPAddress("decode", 50061)),
        ("[::1]:65535", TCPAddress("[::1]", 65535)),
        ("unix:/run/x.sock", UnixAddress(Path("/run/x.sock"))),
        ("unix:///run/x.sock", UnixAddress(Path("/run/x.sock"))),
        ("unix:x.sock", UnixAddress(Path("x.sock"))),
    ],
)
def test_address_is_read_when_it_is_one(text: str, address: TCPAddress | UnixAddress) -> None:
    """`host:port` and `unix:PATH` are the two forms."""
    assert parse_address("listen", text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":50061",
        "host:",
        "host:x",
        "host:-1",
        "host:65536",
        "::1:5",
        "http://h:5",
        "unix:",
        "unix:/a,b",
    ],
)
def test_address_is_refused_when_it_is_none(text: str) -> None:
    """The error names the flag and its value."""
    with pytest.raises(ConfigError, match=r"^prefill="):
        parse_address("prefill", text)


def test_path_is_refused_when_no_socket_can_have_it() -> None:
    """The kernel takes 107 bytes, and grpc would say only that it failed to bind."""
    longest = "/" + "x" * (MAX_PATH_BYTES - 1)
    assert parse_address("listen", f"unix:{longest}") == UnixAddress(Path(longest))

    with pytest.raises(ConfigError, match="the path has 108 bytes, the limit is 107"):
        parse_address("listen", f"unix:{longest}y")


def test_path_is_refused_when_its_directory_is_missing(tmp_path: Path) -> None:
    """The error names the directory to make."""
    with pytest.raises(ConfigError, match=f"directory {tmp_path}/missing does not exist"):
        claim_path("listen", UnixAddress(tmp_path / "missing" / "x.sock"))


def bound(path: Path, kind: socket.SocketKind) -> socket.socket:
    """Bind a socket; one of a stream listens."""
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(str(path))
    if kind is socket.SOCK_STREAM:
        made.listen(1)
    return made


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.write_text("data"), "the path is a file, not a socket"),
        (os.mkfifo, "the path is a FIFO, not a socket; remove it"),
        (Path.mkdir, "the path is a directory, not a socket; remove it"),
        (lambda path: bound(path, socket.SOCK_STREAM), "another process listens"),
        (
            lambda path: bound(path, socket.SOCK_DGRAM),
            "another process may have this socket: Protocol wrong type",
        ),
    ],
    ids=["file", "fifo", "directory", "listener", "datagram socket"],
)
def test_path_is_refused_when_something_is_in_the_way(
    tmp_path: Path, make: Callable[[Path], object], problem: str
) -> None:
    """The error says what it is, and leaves it there: a running service keeps its socket."""
    path = tmp_path / "x"
    made = make(path)

    with pytest.raises(ConfigError, match=problem):
        claim_path("listen", UnixAddress(path))

    assert path.exists()
    if isinstance(made, socket.socket):
        made.close()


def test_path_is_freed_when_its_process_is_dead(tmp_path: Path) -> None:
    """A socket file that nobody answers is a left-over and does not hinder the next start."""
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    claim_path("listen", UnixAddress(path))

    assert not path.exists()


def test_bind_problem_says_what_the_kernel_says() -> None:
    """An operator learns why a port cannot be had, in the words of the system."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert bind_problem(TCPAddress("127.0.0.1", port)) == "Address already in use"
    assert bind_problem(TCPAddress("127.0.0.1", port)) is None
    assert bind_problem(TCPAddress("203.0.113.7", 0)) == "Cannot assign requested address"
    assert bind_problem(TCPAddress("no-such-host.invalid", 0)) is not None


def test_name_is_refused_when_one_of_its_addresses_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may be two addresses: with only one of them this service would hide behind another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = [(socket.AF_INET, 1, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

        assert bind_problem(TCPAddress("localhost", port)) == "Address already in use"


def test_address_that_this_host_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without IPv6 may still name ::1 in its hosts file."""
    found = [(socket.AF_INET, 1, 6, "", (host, 0)) for host in ("203.0.113.7", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    assert bind_problem(TCPAddress("localhost", 0)) is None
