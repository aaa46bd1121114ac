"""The first 4096 bytes of a slab: what it is, how large, whose, and a secret only a mapper can read.

Theory of operation: fixed fields, little endian, then zeros. The nonce is not in any message before
Welcome, so a peer that returns it has read this very memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

HEADER_BYTES = 4096
"""Size of the header, and the unit in which slabs are sized: one memory page."""

NONCE_BYTES = 32
BOOT_ID_BYTES = 64
"""Longest boot id, encoded."""

_MAGIC = b"KVSPSLAB"
_LAYOUT_VERSION = 1
_FIELDS = struct.Struct(f"<8sI4xQ{NONCE_BYTES}sI{BOOT_ID_BYTES}s")


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """The facts in the header page."""

    size_bytes: int
    """Of the whole memory, header included."""

    nonce: bytes
    boot_id: str
    """Of the owner."""

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, got {len(self.nonce)}")
        if len(self.boot_id.encode()) > BOOT_ID_BYTES:
            raise ValueError(f"a boot id has at most {BOOT_ID_BYTES} bytes, got {len(self.boot_id.encode())}")

    @classmethod
    def make(cls, size_bytes: int, boot_id: str, random_bytes: Callable[[int], bytes]) -> SlabHeader:
        """Return the header of a new slab, with a fresh nonce."""
        return cls(size_bytes, random_bytes(NONCE_BYTES), boot_id)

    def pack(self) -> bytes:
        """Return the header page."""
        boot_id = self.boot_id.encode()
        fields = _FIELDS.pack(_MAGIC, _LAYOUT_VERSION, self.size_bytes, self.nonce, len(boot_id), boot_id)
        return fields.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> SlabHeader:
        """Read a header page.

        Raises: `ValueError` when it is short, has another magic or version, or a damaged boot id.
        """
        if len(page) < _FIELDS.size:
            raise ValueError(f"header has {len(page)} bytes, needs {_FIELDS.size}")
        magic, version, size_bytes, nonce, boot_id_len, boot_id = _FIELDS.unpack_from(page)
        if magic != _MAGIC:
            raise ValueError("no slab magic")
        if version != _LAYOUT_VERSION:
            raise ValueError(f"slab layout version {version}, knows {_LAYOUT_VERSION}")
        if boot_id_len > BOOT_ID_BYTES:
            raise ValueError(f"boot id of {boot_id_len} bytes")
        return cls(size_bytes, nonce, boot_id[:boot_id_len].decode())
