"""Turns signals into one orderly end of a service.

Theory of operation: the first SIGTERM, SIGINT or SIGHUP sets `ending`; the service stops taking work, lets
running work finish within its grace and returns. A second signal means the operator will not wait: the
process ends at once with EXIT_NOW. Whoever waits for `ending` decides what that means. A signal that was
ignored when the process began, as nohup does with SIGHUP, stays ignored.

Ownership: one Lifecycle per process, installed by the composition root on the loop of the main thread
and uninstalled by leaving its context.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Self

EXIT_NOW = 0
"""Exit code after a second signal: the end that was asked for, only sooner."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_PR_SET_PDEATHSIG = 1


class Lifecycle:
    """Holds the one event that says: stop taking work.

    Invariant: `ending` is set once and never cleared.
    """

    def __init__(self, exit_now: Callable[[int], object] = os._exit) -> None:
        self.ending = asyncio.Event()
        self._exit_now = exit_now
        self._removals: list[Callable[[], object]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers: tuple[signal.Signals, ...] = ()
        # Invariant: the signals that are listened for.

    def install(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Listen for signals on `loop`, the running one by default; main thread only."""
        self._loop = loop or asyncio.get_running_loop()
        self._numbers = tuple(one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN)
        for number in self._numbers:
            self._loop.add_signal_handler(number, self.receive)

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
