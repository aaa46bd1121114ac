"""Rules of addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.runtime.address import MAX_PATH_BYTES, TCPAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", TCPAddress("127.0.0.1", 0)),
        ("decode:50061", TCPAddress("decode", 50061)),
        ("[::1]:65535", TCPAddress("[::1]", 65535)),
        ("[fe80::1%eth0]:7", TCPAddress("[fe80::1%eth0]", 7)),
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
        "h#x:5",
        "h%41:5",
        "*:5",
        "[localhost]:5",
        "127.1:5",
        "0x7f000001:5",
        "host:\u0665",
        "host:9999999999",
        "unix:",
        "unix:/a,b",
        "unix:/a\nb",
        "unix:/a\x9bb",
    ],
)
def test_address_is_refused_when_it_is_none(text: str) -> None:
    """Also what one program would read in another way than the next; the error names the flag."""
    with pytest.raises(ConfigError, match=r"^prefill="):
        parse_address("prefill", text)


def test_path_is_refused_when_no_socket_can_have_it() -> None:
    """The kernel takes 107 bytes, and grpc would say only that it failed to bind."""
    longest = "/" + "x" * (MAX_PATH_BYTES - 1)
    assert parse_address("listen", f"unix:{longest}") == UnixAddress(Path(longest))

    with pytest.raises(ConfigError, match="the path has 108 bytes, the limit is 107"):
        parse_address("listen", f"unix:{longest}y")
