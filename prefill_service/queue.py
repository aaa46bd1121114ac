"""Whose job the one engine computes next: sessions take turns, one that kept the engine waiting goes last.

Theory of operation: inside a session the oldest job goes first. Between sessions

    in turn   one job each, round and round; who comes while a job is computed goes before its session
    last      sessions whose job held the engine and gave no credit, in turn among themselves

and those in turn go first. Last is not never: once MAX_PASSED jobs have passed a session that is last, it
gets a turn. So every wait has a bound, whoever else asks for how much: a session in turn sees at most one job
of each other before its own, and one of those that are last for every MAX_PASSED jobs.

A job is named by its session and its transfer id, because two sessions may use equal ids. Bounded by what
sessions may have live. Pure: whoever watches is called, nobody is woken. Ownership: event loop only.
Not here: what makes a session last (`decode_peer.py`), the wait for a job (`engine_loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from common.errors import InvariantViolation

MAX_PASSED = 8
"""Jobs that may pass a session that is last. Its tries may hold the engine for nothing, each for about as
long as a prompt takes to compute (`CONTESTED_WAIT_S`): so they cost the others a ninth of the engine."""


class Queued(Protocol):
    """What can be queued."""

    @property
    def key(self) -> tuple[int, int]:
        """(session number, transfer id)."""


JobT = TypeVar("JobT", bound=Queued)


class JobQueue(Generic[JobT]):
    """The jobs that wait, by session."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, JobT]] = {}
        # Invariant: by session and transfer id; no session without a job. The order of the sessions is that
        # of their turns, the order inside a session that of arrival.
        self._last: set[int] = set()
        # Invariant: sessions that go last, with a job waiting or without; `forget` ends it at the latest.
        self._served: int | None = None
        # Invariant: the session whose turn is on, or was the latest.
        self._num_passed = 0
        # Invariant: at most MAX_PASSED; jobs taken in a row while a session that is last had to wait.
        self._on_change: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def watch(self, on_change: Callable[[], object]) -> None:
        """Call `on_change` after each job that came or left from now on; one watcher."""
        self._on_change = on_change

    def put(self, job: JobT) -> None:
        """Add a job behind those of its session."""
        session, transfer_id = job.key
        self._waiting.setdefault(session, {})[transfer_id] = job
        self._on_change()

    def remove(self, key: tuple[int, int]) -> None:
        """Take a job out; nothing happens when it is not there."""
        session, transfer_id = key
        if transfer_id in self._waiting.get(session, {}):
            self._pop(session, transfer_id)
            self._on_change()

    def take(self) -> JobT | None:
        """Take the job whose turn it is; None when there is none."""
        if not self._waiting:
            return None
        # Only now, so that a session that came during that turn goes before the one that had it.
        if self._served in self._waiting:
            self._waiting[self._served] = self._waiting.pop(self._served)
        session = self._next_session()
        self._served = session
        job = self._pop(session, next(iter(self._waiting[session])))
        self._on_change()
        return job

    def others_wait(self, session: int) -> bool:
        """Tell whether a job of another session waits."""
        return any(other != session for other in self._waiting)

    def put_last(self, session: int) -> bool:
        """Let a session go last from now on; False when it does already."""
        is_new = session not in self._last
        self._last.add(session)
        return is_new

    def put_in_turn(self, session: int) -> bool:
        """Let a session take its turns again; False when it does already."""
        was_last = session in self._last
        self._last.discard(session)
        return was_last

    def is_last(self, session: int) -> bool:
        """Tell whether a session goes last."""
        return session in self._last

    def forget(self, session: int) -> None:
        """Drop what is known of a session that has ended and has no job here."""
        self._last.discard(session)

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when the queue contradicts itself."""
        for session, jobs in self._waiting.items():
            names = [(session, transfer_id) for transfer_id in jobs]
            if not jobs or names != [job.key for job in jobs.values()]:
                raise InvariantViolation(f"session {session} queues {names} under other names, or nothing")
        if self._num_passed > MAX_PASSED:
            raise InvariantViolation(f"{self._num_passed} jobs passed, {MAX_PASSED} may")

    def _next_session(self) -> int:
        """Return the session whose turn it is, and count the jobs that pass those who go last."""
        last = next((session for session in self._waiting if session in self._last), None)
        in_turn = next((session for session in self._waiting if session not in self._last), None)
        if last is not None and (in_turn is None or self._num_passed == MAX_PASSED):
            self._num_passed = 0
            return last
        assert in_turn is not None
        self._num_passed = 0 if last is None else self._num_passed + 1
        return in_turn

    def _pop(self, session: int, transfer_id: int) -> JobT:
        jobs = self._waiting[session]
        job = jobs.pop(transfer_id)
        if not jobs:
            del self._waiting[session]
        return job
