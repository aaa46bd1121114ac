"""How many calls of each method may be open: the next one is refused before anything of it is read.

Theory of operation: every method has a number of its own, so that calls of one never keep those of another
out: with all of `Generate` taken, health, status and reflection still answer. Nobody waits here. A call that
finds all taken is refused at once, which costs less than to answer it, because refused clients come back.

    open = silent, has sent nothing yet + answered

A client that opens calls and sends nothing keeps nobody out: a silent call makes room when another one finds
all taken, the oldest first, unless it is so young that its request may be on its way.

Pure but for the clock. Ownership: one per server, event loop only.
Not here: requests that wait for pages and lanes (admission of the decode service).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from common.errors import CallsExhausted
from common.runtime.clock import Clock, SystemClock

DEFAULT_LIMIT = 64
"""Open calls of a method that is named nowhere: health, reflection, what an operator asks."""

PATIENCE_S = 0.25
"""How long a call may be silent before it has to make room. Were it 0, calls of a burst would push one
another out, and none would be answered.
"""


class OpenCall:
    """One call while it is open."""

    def __init__(self, method: str, opened_ns: int) -> None:
        self.method = method
        self.opened_ns = opened_ns
        self.has_made_room = False
        """Set when it has to end for another call, which has been counted in its place."""


class CallLimits:
    """Counts the open calls of each method."""

    def __init__(self, limits: Mapping[str, int] | None = None, clock: Clock | None = None) -> None:
        """Limit the methods with these full names ("/package.Service/Method"); others to DEFAULT_LIMIT."""
        self._limits = dict(limits or {})
        self._clock = clock or SystemClock()
        self._open: Counter[str] = Counter()
        # Invariant: 0 <= open[method] <= limit_of(method).
        self._silent: dict[OpenCall, Callable[[], object]] = {}
        # Invariant: the silent calls, oldest first, each with what ends it.
        self._refused: Counter[str] = Counter()
        # Invariant: refusals since the method was half empty last.
        self._num_exhausted = 0

    def limit_of(self, method: str) -> int:
        """Return how many calls of a method may be open."""
        return self._limits.get(method, DEFAULT_LIMIT)

    def num_refused(self, method: str) -> int:
        """Return how many calls of a method were refused since it was half empty: one line tells of a row."""
        return self._refused[method]

    @property
    def num_exhausted(self) -> int:
        """Calls of all methods that were refused, since start."""
        return self._num_exhausted

    @contextmanager
    def open(self, method: str) -> Iterator[OpenCall]:
        """Count a call as open while the context lasts.

        Raises: `CallsExhausted`; it was not counted as open then.
        """
        if self._open[method] >= self.limit_of(method) and not self._make_room(method):
            raise self.refusal(method)
        self._open[method] += 1
        call = OpenCall(method, self._clock.now_ns())
        try:
            yield call
        finally:
            if not call.has_made_room:
                self._close(method)

    @contextmanager
    def silence(self, call: OpenCall, end: Callable[[], object]) -> Iterator[None]:
        """Count an open call as silent while the context lasts; `end` is called when it has to make room."""
        self._silent[call] = end
        try:
            yield
        finally:
            self._silent.pop(call, None)

    def refusal(self, method: str) -> CallsExhausted:
        """Count a call as refused, and return what to tell its client."""
        self._refused[method] += 1
        self._num_exhausted += 1
        return CallsExhausted(1, 0, f"of {self.limit_of(method)} open calls of {method}")

    def _make_room(self, method: str) -> bool:
        """End the oldest silent call of a method, if it had its time; tell whether there is room now."""
        latest_ns = self._clock.now_ns() - round(PATIENCE_S * 1e9)
        oldest = next((call for call in self._silent if call.method == method), None)
        if oldest is None or oldest.opened_ns > latest_ns:
            return False
        oldest.has_made_room = True
        self._silent.pop(oldest)()
        self._close(method)
        return True

    def _close(self, method: str) -> None:
        self._open[method] -= 1
        if 2 * self._open[method] <= self.limit_of(method):
            self._refused[method] = 0
