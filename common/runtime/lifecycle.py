"""Turns signals into one orderly end of a command, and of a service.

Theory of operation: from its first moment a command has handlers for SIGTERM, SIGINT and SIGHUP, since the
kernel drops what is sent to process 1 of a container and finds none. Until a service is loaded nothing has to
be told to anybody, so an `EarlyEnd` leaves whatever runs. From then on the first signal sets `ending` of the
`Lifecycle`; the service stops taking work, lets running work finish within its grace and returns. A second
signal means the operator will not wait: the process ends at once with EXIT_NOW. Whoever waits for `ending`
decides what that means. A signal that was ignored when the process began, as nohup does with SIGHUP, stays
ignored.

Ownership: one of each per process. The command line enters an `EarlyEnd`; the composition root installs a
`Lifecycle` on the loop of the main thread, which takes its place, and uninstalls it by leaving its context.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any, Self

ExitNow = Callable[[int], object]
"""Ends the process at once, with this exit code."""

EXIT_NOW = 0
"""Exit code after a second signal: the end that was asked for, only sooner."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

EXIT_BY_SIGNAL = 128
"""Added to the number of a signal: what shells give a program that it ended."""

LOOK_AGAIN_S = 0.02

_PR_SET_PDEATHSIG = 1


class EarlyEnd:
    """Takes signals while a command runs that has no `Lifecycle`; a context.

    The first one raises SystemExit in the main thread, which leaves every context and so every file behind;
    a second one ends the process at once. While a native module is loaded the first one waits: what is raised
    in those that it imports is swallowed, by torch for one, and half of a module is used.
    """

    def __init__(
        self, numbers: Sequence[signal.Signals], exit_code: int | None = None, exit_now: ExitNow = os._exit
    ) -> None:
        """Take `numbers`; without an exit code each ends the command with its own."""
        self._numbers = heard(numbers)
        self._exit_code = exit_code
        self._exit_now = exit_now
        self._told: int | None = None
        # Invariant: the exit code of the first signal.
        self._before: dict[signal.Signals, Any] = {}
        # Invariant: the handlers that were there, of the signals that are listened for.

    @property
    def is_told(self) -> bool:
        """Whether a signal came; a library that catches everything may have swallowed it."""
        return self._told is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take one signal; see `signal.signal`."""
        if self._told is not None:
            self._exit_now(self._told)
        self._told = EXIT_BY_SIGNAL + number if self._exit_code is None else self._exit_code
        self._leave(0, frame)

    def __enter__(self) -> Self:
        # Only the main thread can; a command line that runs in another one is not ended by signals.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the handlers back; when a signal came, raise SystemExit whatever became of the first."""
        if self._told is not None:
            # The process is about to end: another signal must not change its exit code.
            atexit.register(_ignore_signals)
            raise SystemExit(self._told)
        for number, handler in self._before.items():
            # A Lifecycle that was told leaves its own, for the same reason.
            if signal.getsignal(number) is self:
                signal.signal(number, handler)

    def _leave(self, _: int, frame: FrameType | None) -> None:
        """End what runs, or look again in a moment while native code does; a Lifecycle may come before."""
        if not any(signal.getsignal(number) is self for number in self._numbers):
            return
        if not _loads_native_module(frame):
            raise SystemExit(self._told)
        signal.signal(signal.SIGALRM, self._leave)
        signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN_S)


def _loads_native_module(frame: FrameType | None) -> bool:
    while frame is not None and not isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
        frame = frame.f_back
    return frame is not None


class Lifecycle:
    """Holds the one event that says: stop taking work.

    Invariant: `ending` is set once and never cleared.
    """

    def __init__(self, exit_now: ExitNow = os._exit) -> None:
        self.ending = asyncio.Event()
        self._exit_now = exit_now
        self._removals: list[Callable[[], object]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers: tuple[signal.Signals, ...] = ()
        # Invariant: the signals that are listened for.

    def install(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Listen for signals on `loop`, the running one by default; main thread only."""
        self._loop = loop or asyncio.get_running_loop()
        self._numbers = heard(SIGNALS)
        for number in self._numbers:
            early = signal.getsignal(number)
            self._loop.add_signal_handler(number, self.receive)
            if isinstance(early, EarlyEnd) and early.is_told:
                self.ending.set()

    def before_exit(self, remove: Callable[[], object]) -> None:
        """Call `remove` before a second signal ends the process, which runs nothing else then."""
        self._removals.append(remove)

    def uninstall(self) -> None:
        """Stop listening; does nothing when not installed.

        After the first a late signal still means an end at once with EXIT_NOW, and nothing more when the
        interpreter itself ends. Else the signals have their default meaning again.
        """
        if self._loop is None:
            return
        for number in self._numbers:
            self._loop.remove_signal_handler(number)
            if self.ending.is_set():
                signal.signal(number, lambda number, frame: self.receive())
        if self.ending.is_set():
            atexit.register(_ignore_signals)
        self._loop = None

    def receive(self) -> None:
        """Take one signal: begin to shut down, or end the process when that has begun already."""
        if self.ending.is_set():
            for remove in self._removals:
                remove()
            self._exit_now(EXIT_NOW)
        self.ending.set()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def heard(numbers: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return those signals that this process does not ignore."""
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent(parent_pid: int) -> bool:
    """Ask the kernel for SIGTERM when the process `parent_pid`, which started this one, is gone.

    Returns False when it is gone already: the caller ends then. Not even a parent that was killed leaves
    an orphan behind. Holds for the thread that started this process, so a parent starts it from its main
    thread. Linux only, as the slab is.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return os.getppid() == parent_pid
