"""The first page of a slab."""

import pytest

from common.slab.header import BOOT_ID_BYTES, HEADER_BYTES, NONCE_BYTES, SlabHeader

HEADER = SlabHeader(size_bytes=3 * HEADER_BYTES, nonce=bytes(range(NONCE_BYTES)), boot_id="boot-7")


def test_a_header_is_read_as_it_was_written() -> None:
    """The header fills one page and gives back every field."""
    page = HEADER.pack()

    assert len(page) == HEADER_BYTES
    assert SlabHeader.unpack(page) == HEADER


def test_the_nonce_comes_from_the_given_source() -> None:
    """Randomness is an argument."""
    header = SlabHeader.make(3 * HEADER_BYTES, "boot-7", lambda length: b"\x05" * length)

    assert header.nonce == b"\x05" * NONCE_BYTES


@pytest.mark.parametrize(
    ("offset", "replacement", "problem"),
    [
        (0, b"X", "magic"),
        (8, b"\x09", "version 9"),
        (56, b"\xff", "boot id"),
        (60, b"\xff", "invalid start byte"),
    ],
)
def test_a_header_is_refused_when_a_field_is_damaged(offset: int, replacement: bytes, problem: str) -> None:
    """Another kind of file, another version or garbage is not taken for a slab."""
    page = bytearray(HEADER.pack())
    page[offset : offset + 1] = replacement

    with pytest.raises(ValueError, match=problem):
        SlabHeader.unpack(bytes(page))


def test_a_header_is_refused_when_the_page_is_short() -> None:
    """A file that ends inside the header is not a slab."""
    with pytest.raises(ValueError, match="needs"):
        SlabHeader.unpack(HEADER.pack()[:20])


@pytest.mark.parametrize(
    ("nonce_len", "boot_id_len"), [(NONCE_BYTES - 1, 5), (NONCE_BYTES, BOOT_ID_BYTES + 1)]
)
def test_a_header_is_refused_when_a_field_does_not_fit(nonce_len: int, boot_id_len: int) -> None:
    """A nonce has its exact length and a boot id at most 64 bytes."""
    with pytest.raises(ValueError, match="bytes"):
        SlabHeader(2 * HEADER_BYTES, b"n" * nonce_len, "b" * boot_id_len)
