"""Answers how many connections a process has room for, and tells when its descriptors run out.

Theory of operation: a server that has no descriptor left cannot reach its peers either, nor open a file. So
it takes fewer connections than there is room for, and ends idle ones; the fewer it can have, the sooner:

    | open at start | connections, refused beyond | RESERVE: sessions, slabs, files |
                                                                                limit

The kernel gives out the lowest free number. A high one therefore shows that almost all below are taken, and
costs less to learn than to count them.
"""

from __future__ import annotations

import errno
import os
import resource

RESERVE = 64
"""Descriptors that connections of clients leave: 32 sessions with a slab each, and files."""

FEW_LEFT = RESERVE + 16
"""At most so many left are worth a line: clients are about to be refused."""

RECOVERED = 2 * RESERVE
"""With so many left again the next shortage is worth a line of its own."""

FEWEST_CONNECTIONS = 8

SHORTEST_IDLE_S, LONGEST_IDLE_S = 2.0, 60.0

CONNECTIONS_PER_IDLE_S = 64
"""A second of idleness is allowed for so many connections that there is room for."""


def raise_limit() -> int:
    """Let this process have as many descriptors as its hard limit says; return how many that are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def num_left() -> int:
    """Return how many descriptors are left, as told by the lowest free one."""
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return 0
    os.close(lowest)
    return descriptor_limit() - lowest


def connection_limit(left: int) -> int:
    """Return how many connections of clients to take when so many descriptors are left."""
    return max(FEWEST_CONNECTIONS, left - RESERVE)


def idle_limit_s(num_connections: int) -> float:
    """Return after how many seconds without a call a connection ends where so many are taken."""
    return min(LONGEST_IDLE_S, max(SHORTEST_IDLE_S, num_connections / CONNECTIONS_PER_IDLE_S))


class ScarcityWatch:
    """Remembers whether a shortage was told."""

    def __init__(self) -> None:
        self._is_told = False

    def is_due(self, left: int) -> bool:
        """Tell whether a line is due now that so many are left: once per shortage."""
        if left > RECOVERED:
            self._is_told = False
        is_due = left <= FEW_LEFT and not self._is_told
        self._is_told = self._is_told or is_due
        return is_due
