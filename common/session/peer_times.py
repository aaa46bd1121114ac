"""Whether the times that a producer tells of one transfer can be true, and what stands in for them if not.

Theory of operation: both services read CLOCK_MONOTONIC of one kernel, so what a producer tells must lie, in
order, between what decode itself read around it:

    StartPrefill sent <= accepted <= started <= ended <= PrefillDone received
    StartPrefill sent <= written <= sealed <= KVSpan received

Anything else is a clock error: another clock or unit, a bug, or nothing told, which is zero. A clock that is
wrong once is believed in nothing: the engine then counts as running from the request to its end as decode saw
both, so that stages still sum to the whole and none is below zero. Times are compared and never subtracted
here, so a clock near zero, of a machine that has just started, is as good as any.

Pure. Ownership: one object per transfer, event loop only.
"""

from __future__ import annotations

from itertools import pairwise

from common.kv.spans import Span
from common.session.messages import SourceTimings

Times = dict[str, int]
"""Moments by name, in the order in which they must have been."""


class PeerTimes:
    """What a producer tells of time, held against what was measured here."""

    def __init__(self, asked_ns: int) -> None:
        """Begin at the moment before StartPrefill is sent."""
        self._asked_ns = asked_ns
        self._engine_ns: tuple[int, int] | None = None
        # Invariant: asked_ns <= start <= end <= the moment at which Done was received.
        self._problem = ""

    @property
    def problem(self) -> str:
        """The first times that cannot be true, with those around them; empty while all can."""
        return self._problem

    @property
    def engine_ns(self) -> tuple[int, int]:
        """Start and end of the engine; only after Done."""
        assert self._engine_ns is not None
        return self._engine_ns

    def span_received(self, span: Span, now_ns: int) -> None:
        """Check the times of a span at the moment it was received."""
        self._check({"written_ns": span.written_ns, "sealed_ns": span.sealed_ns}, now_ns)

    def done_received(self, timings: SourceTimings, now_ns: int) -> None:
        """Check the engine's times at the moment Done was received, and choose whose are believed.

        The first Done ends the transfer, well or not; a later one says nothing.
        """
        if self._engine_ns is not None:
            return
        told = {
            "accepted_ns": timings.accepted_ns,
            "started_ns": timings.started_ns,
            "ended_ns": timings.ended_ns,
        }
        self._check(told, now_ns)
        is_believed = not self._problem
        ours, theirs = (self._asked_ns, now_ns), (timings.started_ns, timings.ended_ns)
        self._engine_ns = theirs if is_believed else ours

    def _check(self, told: Times, now_ns: int) -> None:
        moments = [self._asked_ns, *told.values(), now_ns]
        is_in_order = all(before <= after for before, after in pairwise(moments))
        if (is_in_order and all(told.values())) or self._problem:
            return
        values = ", ".join(f"{name}={value}" for name, value in told.items())
        self._problem = f"{values}, asked at {self._asked_ns} and heard at {now_ns}"
