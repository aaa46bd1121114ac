"""The digest of a span's bytes."""

import pytest

from common.kv.digest import DigestKind, digest


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (DigestKind.OFF, ""),
        (DigestKind.XXH3_64, "78af5f94892f3950"),
        (DigestKind.XXH3_128, "06b05ab6733a618578af5f94892f3950"),
    ],
)
def test_the_digest_is_the_published_one(kind: DigestKind, expected: str) -> None:
    """Digests are the big-endian XXH3 of the bytes, so that another implementation agrees."""
    assert digest(kind, b"abc").hex() == expected


@pytest.mark.parametrize("kind", list(DigestKind))
def test_the_digest_has_the_length_its_kind_says(kind: DigestKind) -> None:
    """The session checks the length of a told digest by its kind."""
    assert len(digest(kind, b"abc")) == kind.digest_bytes


def test_the_digest_reads_a_view_of_part_of_a_buffer() -> None:
    """A view gives the digest of exactly its bytes."""
    buffer = bytearray(b"..abc..")

    assert digest(DigestKind.XXH3_64, memoryview(buffer)[2:5]) == digest(DigestKind.XXH3_64, b"abc")


def test_the_digest_changes_when_one_bit_does() -> None:
    """A torn byte is found."""
    assert digest(DigestKind.XXH3_64, b"abc") != digest(DigestKind.XXH3_64, b"abb")
