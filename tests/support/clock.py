"""Time that moves when a test says so."""

from __future__ import annotations


class ManualClock:
    """A `Clock` that stands still until told to move."""

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
