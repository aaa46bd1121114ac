"""How many calls of each method may be open: the next one is refused before anything of it is read.

Theory of operation: every method has a number of its own, so that calls of one never keep those of another
out: with all of `Generate` taken, health, status and reflection still answer. Nobody waits here. A call that
finds all taken is refused at once, which costs less than to answer it, because refused clients come back.

Pure. Ownership: one per server, event loop only.
Not here: requests that wait for pages and lanes (admission of the decode service).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from common.errors import CallsExhausted

DEFAULT_LIMIT = 64
"""Open calls of a method that is named nowhere: health, reflection, what an operator asks."""


class CallLimits:
    """Counts the open calls of each method."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        """Limit the methods with these full names ("/package.Service/Method"); others to DEFAULT_LIMIT."""
        self._limits = dict(limits or {})
        self._open: Counter[str] = Counter()
        # Invariant: 0 < open[method] <= limit_of(method) for each key.
        self._refused: Counter[str] = Counter()
        # Invariant: refusals since the method was half empty last.
        self._num_exhausted = 0

    def limit_of(self, method: str) -> int:
        """Return how many calls of a method may be open."""
        return self._limits.get(method, DEFAULT_LIMIT)

    def num_open(self, method: str) -> int:
        """Return how many calls of a method are open."""
        return self._open[method]

    def num_refused(self, method: str) -> int:
        """Return how many calls of a method were refused since it was half empty: one line tells of a row."""
        return self._refused[method]

    @property
    def num_exhausted(self) -> int:
        """Calls of all methods that were refused, since start."""
        return self._num_exhausted

    @contextmanager
    def open(self, method: str) -> Iterator[None]:
        """Count a call as open while the context lasts.

        Raises: `CallsExhausted`; it was not counted as open then.
        """
        limit = self.limit_of(method)
        if self._open[method] >= limit:
            self._refused[method] += 1
            self._num_exhausted += 1
            raise CallsExhausted(1, 0, f"of {limit} open calls of {method}")
        self._open[method] += 1
        try:
            yield
        finally:
            self._open[method] -= 1
            if 2 * self._open[method] <= limit:
                self._refused[method] = 0
