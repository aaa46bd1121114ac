"""Slabs with a door that somebody answers, and the list in which a prefill service has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.slab.mapped import MappedSlabs, SlabLimits
from common.slab.segment import SlabSegment


def make_slabs(slab_bytes: int = 1 << 30, slabs_bytes: int = 1 << 32) -> MappedSlabs:
    """Return a list with room for what tests make."""
    return MappedSlabs(SlabLimits(slab_bytes, slabs_bytes))


@contextmanager
def served_slab(directory: Path, size_bytes: int, boot_id: str) -> Iterator[SlabSegment]:
    """Yield a slab whose door is served by the running event loop."""
    with SlabSegment.create(directory, size_bytes, boot_id) as slab:
        slab.door.serve(asyncio.get_running_loop())
        yield slab
