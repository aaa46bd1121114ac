"""Tells when a peer has been silent for too long.

Theory of operation: a hung process keeps its connection, and the transport answers for it; only messages of
the application prove life. The watch is looked at every `interval_s`, and decode pings as often: at least
three times in the shortest limit that either side may have, since each judges by a limit of its own. When it
was not looked at for much longer, this process itself was stopped: its peer may have spoken all the while,
so the count starts again.

Pure but for the clock. Ownership: one per session and side, event loop only.
"""

from __future__ import annotations

from common.runtime.clock import Clock

CHECKS_PER_LIMIT = 3
"""Looks, and pings, per limit: two may be lost in a busy moment without harm."""

SHORTEST_LIMIT_S = 1.5
"""No side may be told to wait for less: the other one would have to know of it to ping more often."""


class SilenceWatch:
    """Remembers when the peer was heard last."""

    def __init__(self, limit_s: float, clock: Clock) -> None:
        self._limit_ns = round(limit_s * 1e9)
        self._clock = clock
        self._heard_ns = self._looked_ns = clock.now_ns()

    @property
    def interval_s(self) -> float:
        """Seconds between two looks, and between two pings."""
        return min(self.limit_s, SHORTEST_LIMIT_S) / CHECKS_PER_LIMIT

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which a peer counts as lost."""
        return self._limit_ns / 1e9

    def heard(self) -> None:
        """The peer said something."""
        self._heard_ns = self._clock.now_ns()

    def look(self) -> bool:
        """Tell whether the peer has been silent for too long; called every `interval_s`."""
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns > self._limit_ns:
            self._heard_ns = now_ns
        self._looked_ns = now_ns
        return now_ns - self._heard_ns > self._limit_ns
