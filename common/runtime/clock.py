"""Tells time as an argument, so that rules about time can be tested without waiting.

Theory of operation: time is CLOCK_MONOTONIC in nanoseconds. All processes of one host read the same
clock, so timestamps of both services can be compared; they mean nothing on another host.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Reads a time that never runs backwards."""

    def now_ns(self) -> int:
        """Return nanoseconds since an arbitrary start that all processes of the host share."""
        ...


class SystemClock:
    """Reads CLOCK_MONOTONIC."""

    __slots__ = ()

    def now_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""
        return time.monotonic_ns()
