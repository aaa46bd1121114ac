"""What cannot be listened at is refused by name, and what is another's stays as it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.runtime.address import TCPAddress, UnixAddress
from common.runtime.listening import claim_path, free_addresses


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
        (lambda path: path.symlink_to("nowhere"), "the path is a link, not a socket"),
        (lambda path: bound(path, socket.SOCK_STREAM), "another process listens"),
        (
            lambda path: bound(path, socket.SOCK_DGRAM),
            "another process may have this socket: Protocol wrong type",
        ),
    ],
    ids=["file", "fifo", "directory", "dangling link", "listener", "datagram socket"],
)
def test_path_is_refused_when_something_is_in_the_way(
    tmp_path: Path, make: Callable[[Path], object], problem: str
) -> None:
    """The error says what it is, and leaves it there: a running service keeps its socket."""
    path = tmp_path / "x"
    made = make(path)

    with pytest.raises(ConfigError, match=problem):
        claim_path("listen", UnixAddress(path))

    assert os.path.lexists(path)
    if isinstance(made, socket.socket):
        made.close()


def test_path_is_freed_when_its_process_is_dead(tmp_path: Path) -> None:
    """A socket file that nobody answers is a left-over and does not hinder the next start."""
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    claim_path("listen", UnixAddress(path))

    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_path_is_refused_when_the_socket_is_of_another_user(tmp_path: Path) -> None:
    """Its process may be one that this user cannot see; not even root removes it."""
    path = tmp_path / "x.sock"
    bound(path, socket.SOCK_STREAM).close()
    os.chown(path, 12345, 12345)

    with pytest.raises(ConfigError, match="the socket belongs to user 12345; remove it or take another path"):
        claim_path("listen", UnixAddress(path))

    assert path.exists()


def free(host: str, port: int) -> list[str]:
    """Return what would be bound, by number."""
    return [address.host for address in free_addresses("listen", TCPAddress(host, port))]


def test_port_that_is_taken_is_refused_in_the_words_of_the_system() -> None:
    """An operator learns why a port cannot be had; once it is free it can."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"^listen=127.0.0.1:{port}: cannot listen: Address already in"):
            free("127.0.0.1", port)
    assert free("127.0.0.1", port) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("203.0.113.7", "cannot listen: Cannot assign requested address"),
        ("no-such-host.invalid", "'no-such-host.invalid' has no address: "),
    ],
)
def test_host_that_is_not_this_one_is_refused(host: str, problem: str) -> None:
    """An address of somebody else, and a name of nobody."""
    with pytest.raises(ConfigError, match=problem):
        free(host, 0)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "[::]"])
@pytest.mark.parametrize("taken", ["127.0.0.1", "::1"])
def test_name_is_refused_when_one_of_its_addresses_is_taken(host: str, taken: str) -> None:
    """Row Y20: `localhost` and wildcards are two addresses; with one of them a service would hide another."""
    if taken == "::1" and not has_ipv6():
        pytest.skip("this host has no IPv6")
    family = socket.AF_INET6 if taken == "::1" else socket.AF_INET
    with socket.create_server((taken, 0), family=family) as server:
        port = server.getsockname()[1]

        with pytest.raises(ConfigError, match=r"cannot listen( on \S+)?: Address already in use"):
            free(host, port)


def test_all_addresses_of_a_name_get_the_port_that_the_kernel_chose() -> None:
    """Whoever is told one port reaches the service at each of them."""
    found = free_addresses("listen", TCPAddress("localhost", 0))

    assert [address.host for address in found] == ["127.0.0.1", "[::1]"][: 2 if has_ipv6() else 1]
    assert len({address.port for address in found}) == 1


def test_address_that_this_host_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without IPv6 may still name ::1 in its hosts file."""
    found = [(socket.AF_INET, 1, 6, "", (host, 0)) for host in ("203.0.113.7", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    assert free("two", 0) == ["127.0.0.1"]


def has_ipv6() -> bool:
    """Tell whether this host has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
