"""Which slabs of peers a process has, so that their sum is bounded and no two sessions share one.

Theory of operation: a slab is entered before it is mapped and leaves when its session has given it up, which
is after the last write of an engine, however long ago the stream ended. So two sessions that name one memory
at the same moment cannot both have it, and nobody overwrites the sealed spans of another one.

Ownership: one per prefill service, shared by the threads that map slabs; every method is one turn.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from common.errors import InvariantViolation
from common.slab.refusal import not_shared
from common.slab.sealed_memory import MemoryId


@dataclass(frozen=True, slots=True)
class SlabLimits:
    """How much of what peers name is mapped."""

    slab_bytes: int
    """Of one."""

    slabs_bytes: int
    """Of all sessions together."""


@dataclass(frozen=True, slots=True)
class MappedStatistics:
    """What is mapped, or is being mapped, now."""

    num_slabs: int
    num_bytes: int


class MappedSlabs:
    """The slabs of peers that this process has."""

    def __init__(self, limits: SlabLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._sizes: dict[MemoryId, int] = {}
        self._num_bytes = 0
        # Invariant: the sum of the sizes, at most limits.slabs_bytes.

    def statistics(self) -> MappedStatistics:
        """Return the counts now."""
        with self._lock:
            return MappedStatistics(len(self._sizes), self._num_bytes)

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when the counts and the limits do not agree."""
        with self._lock:
            total, largest = sum(self._sizes.values()), max(self._sizes.values(), default=0)
            if total != self._num_bytes or total > self._limits.slabs_bytes:
                counts = f"{self._num_bytes} slab bytes counted, {total} held"
                raise InvariantViolation(f"{counts}, the limit is {self._limits.slabs_bytes}")
            if largest > self._limits.slab_bytes:
                raise InvariantViolation(f"a slab of {largest} bytes, the limit is {self._limits.slab_bytes}")

    def check_size(self, size_bytes: int) -> None:
        """Raise `SlabNotShared` when a slab is larger than any may be."""
        if size_bytes > self._limits.slab_bytes:
            found = f"takes {self._limits.slab_bytes} at most, see --max-slab-bytes"
            raise not_shared("slab.size_bytes", str(size_bytes), found)

    def enter(self, memory: MemoryId, size_bytes: int) -> None:
        """Have one more slab, until it leaves.

        Raises: `SlabNotShared` when a session has it, it is too large, or all together would be; nothing is
        entered.
        """
        self.check_size(size_bytes)
        with self._lock:
            if memory in self._sizes:
                raise not_shared("slab.memory", "made it for this session", "has it in another session")
            if self._num_bytes + size_bytes > self._limits.slabs_bytes:
                found = f"takes {self._limits.slabs_bytes} of all sessions, see --max-slabs-bytes"
                raise not_shared("slab.size_bytes", str(size_bytes), found)
            self._sizes[memory] = size_bytes
            self._num_bytes += size_bytes

    def leave(self, memory: MemoryId) -> None:
        """Have a slab no more; nothing writes into it.

        Raises: `InvariantViolation` when it never entered.
        """
        with self._lock:
            if memory not in self._sizes:
                raise InvariantViolation(f"slab {memory} leaves and is not there")
            self._num_bytes -= self._sizes.pop(memory)
