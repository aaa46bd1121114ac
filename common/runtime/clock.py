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


class ManualClock:
    """Stands still until told to move; for tests and replays."""

    __slots__ = ("_now_ns",)

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Return the time it was last moved to."""
        return self._now_ns

    def advance_ns(self, step_ns: int) -> None:
        """Move forward by `step_ns`; a step below zero raises ValueError and changes nothing."""
        if step_ns < 0:
            raise ValueError(f"a clock never runs backwards: {step_ns} ns")
        self._now_ns += step_ns

    def advance_s(self, step_s: float) -> None:
        """Move forward by `step_s` seconds."""
        self.advance_ns(round(step_s * 1e9))
