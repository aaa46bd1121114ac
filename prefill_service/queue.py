"""Jobs of all sessions in the order in which the one engine takes them.

Theory of operation: first come, first served over all sessions; a job is named by its session and its
transfer id, because two sessions may use equal ids. Bounded by what sessions may have live.

Pure but for the asyncio event that wakes the one consumer; whoever waits until nothing is queued is told of
each job that leaves. Ownership: event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What can be queued."""

    @property
    def key(self) -> tuple[int, int]:
        """(session number, transfer id)."""


JobT = TypeVar("JobT", bound=Queued)


class JobQueue(Generic[JobT]):
    """FIFO with removal by key."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[int, int], JobT] = {}
        self._filled = asyncio.Event()
        # Invariant: _filled is set exactly while _jobs has an entry.
        self._on_left: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return len(self._jobs)

    def watch(self, on_left: Callable[[], object]) -> None:
        """Call `on_left` after each job that leaves the queue from now on, taken or removed; one watcher."""
        self._on_left = on_left

    def put(self, job: JobT) -> None:
        """Add a job at the end."""
        self._jobs[job.key] = job
        self._filled.set()

    def remove(self, key: tuple[int, int]) -> None:
        """Take a job out; nothing happens when it is not there."""
        left = self._jobs.pop(key, None)
        if not self._jobs:
            self._filled.clear()
        if left is not None:
            self._on_left()

    async def take(self) -> JobT:
        """Wait for a job and take the oldest."""
        # A job may be gone again before the consumer that it woke has its turn.
        while not self._jobs:
            await self._filled.wait()
        key = next(iter(self._jobs))
        job = self._jobs[key]
        self.remove(key)
        return job
