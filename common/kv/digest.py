"""The digest of a span's bytes, and the only import of xxhash.

A digest finds bytes sealed too early, torn or misplaced; it is not a defence against a peer that lies.
`digest` lets go of the GIL while it reads, so a service thread may hash beside a busy step loop.
"""

from __future__ import annotations

import enum

import xxhash


class DigestKind(enum.Enum):
    """What the session agreed to compute over every span."""

    OFF = "off"
    XXH3_64 = "xxh3-64"
    XXH3_128 = "xxh3-128"

    @property
    def digest_bytes(self) -> int:
        """Length of a digest of this kind."""
        return _DIGEST_BYTES[self]


_DIGEST_BYTES = {DigestKind.OFF: 0, DigestKind.XXH3_64: 8, DigestKind.XXH3_128: 16}


def digest(kind: DigestKind, buffer: bytes | bytearray | memoryview) -> bytes:
    """Return the digest, big endian; empty for `OFF`."""
    if kind is DigestKind.XXH3_64:
        return xxhash.xxh3_64_digest(buffer)
    if kind is DigestKind.XXH3_128:
        return xxhash.xxh3_128_digest(buffer)
    return b""
