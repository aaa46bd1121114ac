"""Slabs with a door that somebody answers, and the list in which a prefill service has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.kv.ranges import Range
from common.slab.door import SlabDoor
from common.slab.header import HEADER_BYTES
from common.slab.mapped import MappedSlabs, SlabLimits
from common.slab.segment import SlabSegment
from common.slab.socket_file import make_name


def make_slabs(slab_bytes: int = 1 << 30, slabs_bytes: int = 1 << 32) -> MappedSlabs:
    """Return a list with room for what tests make."""
    return MappedSlabs(SlabLimits(slab_bytes, slabs_bytes))


@contextmanager
def served_slab(directory: Path, size_bytes: int, boot_id: str) -> Iterator[SlabSegment]:
    """Yield a slab whose door is served by the running event loop."""
    with SlabSegment.create(directory, size_bytes, boot_id) as slab:
        slab.door.serve(asyncio.get_running_loop())
        yield slab


@dataclass(frozen=True, slots=True)
class FalseSlab:
    """What decode says of a slab that may be none."""

    name: str
    size_bytes: int

    @property
    def data(self) -> Range:
        """See `SlabSegment`."""
        return Range(HEADER_BYTES, self.size_bytes)


@contextmanager
def false_slab(directory: Path, memory: int, size_bytes: int) -> Iterator[FalseSlab]:
    """Yield a slab whose door, served by the running event loop, hands over that descriptor; close both."""
    name = make_name(os.urandom)
    door = SlabDoor(directory, name, memory)
    door.serve(asyncio.get_running_loop())
    try:
        yield FalseSlab(name, size_bytes)
    finally:
        door.close()
        os.close(memory)
