"""Runs work of somebody else in a process of its own, within a time and a memory that nothing in it can pass.

Theory of operation: inside a process a step of native code cannot be stopped, and what it allocates is taken
from everybody. So the work has a process, made without a fork of the threads here, and the kernel bounds it:

    an alarm that nobody handles    ends it when an order takes longer than the limit, also in native code
    a limit of its data             makes allocations fail beyond the room; it ends when one does
    the end of its parent           ends it too

An order and its answer are JSON in one line each. A process that has ended is replaced before the next order.

Ownership: `Confined` owns the process and its pipes; calls wait for each other, and are not for the event
loop.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

from common.runtime.lifecycle import end_with_parent

Work = Callable[[Any], Any]
"""Takes an order and returns the answer, both as JSON can say them."""

Make = Callable[..., tuple[Any, Work]]
"""Returns what the work says of itself, and the work."""

MAKE_LIMIT_S = 30.0
"""Seconds in which the work has to be made ready for its first order."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from common.runtime.confined import main; main()"
)

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""The services share the cores out; this one takes none of them for long."""


class Ended(Exception):
    """The process ended before it answered; says of what."""


class Confined:
    """A process that does one kind of work; a context."""

    def __init__(self, make: Make, *args: Any, limit_s: float, room_bytes: int) -> None:
        """Take what makes the work there; it and `args` must be picklable. Nothing runs before `start`."""
        self._state = pickle.dumps((os.getpid(), limit_s, room_bytes, make, args))
        self._limit_s, self._room_bytes = limit_s, room_bytes
        self._process: subprocess.Popen[bytes] | None = None
        # Invariant: None before the start, and once a process that has ended was reaped.
        self._lock = threading.Lock()
        # Invariant: held while an order is out, and while a process is made.
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> Any:
        """Return what the work says of itself; raises `Ended` when it cannot be made in time."""
        with self._lock:
            return self._start()

    def ask(self, order: Any) -> Any:
        """Return the answer to an order; raises `Ended`, also when no process can be made."""
        line = json.dumps(order).encode() + b"\n"
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._reap(self._process)
            if self._process is None:
                self._start()
            assert self._process is not None
            return self._exchange(self._process, line, self._limit_s)

    def close(self) -> None:
        """End the process, also under an order; nothing is asked afterwards. May be called again."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._reap(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Any:
        if self._is_closed:
            raise Ended("was closed")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what native code says at its end is no line of our log
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,  # an interrupt at the terminal is for the service
        )
        return self._exchange(self._process, self._state, MAKE_LIMIT_S)

    def _exchange(self, process: subprocess.Popen[bytes], message: bytes, limit_s: float) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(message)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        self._reap(process)
        raise Ended(self._end(process.returncode, limit_s))

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.communicate()

    def _end(self, code: int, limit_s: float) -> str:
        """Return of what a process ended."""
        if code == -signal.SIGALRM:
            return f"not ended within {limit_s:g} s"
        if code in (-signal.SIGABRT, _OUT_OF_MEMORY):
            return f"not ended within {self._room_bytes >> 20} MiB of memory"
        return f"ended its process with {code}"


_OUT_OF_MEMORY = 3
"""Exit code of Python that could not allocate; native code aborts."""


def main() -> None:
    """Do the work of the parent that wrote its state to stdin; the process ends with it."""
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what somebody prints is no answer
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent, limit_s, room_bytes, make, args = pickle.load(orders)
    if not end_with_parent(parent):
        return
    limit = _data_bytes() + room_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        signal.setitimer(signal.ITIMER_REAL, MAKE_LIMIT_S)
        made, work = make(*args)
        _answer(answers, made)
        for line in orders:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            _answer(answers, work(json.loads(line)))
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)


def _answer(answers: Any, answer: Any) -> None:
    line = json.dumps(answer).encode() + b"\n"
    signal.setitimer(signal.ITIMER_REAL, 0)
    answers.write(line)
    answers.flush()


def _data_bytes() -> int:
    """Return the bytes of this process that count for the limit of its data."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
