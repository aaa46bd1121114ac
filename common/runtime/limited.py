"""Runs Python of somebody else for a limited time.

Theory of operation: the work has a thread of its own. When its time is over, an exception is raised in that
thread at its next step, which ends any loop of Python. What this cannot end is a single step of native code
that never returns; nothing inside a process can.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Made = TypeVar("Made")

NUM_TRIES, TRY_S = 50, 0.1
"""How often a thread is told to end, and how long it may take each time: it may just clean up."""


class _OutOfTime(SystemExit):
    """Raised in the thread; no `Exception`, so that no handler of errors swallows it."""


def run_limited(work: Callable[[], Made], limit_s: float) -> Made:
    """Return what `work` returns; blocks, so not for the event loop.

    Raises: what `work` raises; `TimeoutError` when it was stopped because it did not end within `limit_s`.
    """
    outcome: Future[Made] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="limited", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not thread.is_alive():
        try:
            return outcome.result()
        finally:
            del outcome  # the frames of an error must not hold it
    _stop(thread)
    raise TimeoutError(f"not ended within {limit_s:g} s")


def _stop(thread: threading.Thread) -> None:
    set_exception: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for _ in range(NUM_TRIES):
        if not thread.is_alive():
            return
        set_exception(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_OutOfTime))
        thread.join(TRY_S)
