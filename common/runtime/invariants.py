"""Brings a broken invariant to the event loop, and from there to whoever stops the service.

Theory of operation: an `InvariantViolation` in a handler reaches its interceptor, and one in a task that the
service waits for ends that task. One on a thread, or in a callback of the loop, would be logged and no
more: threads hand theirs to the loop (`raise_on`), and the loop hands what its callbacks raise to the
service (`watch_callbacks`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from common.errors import InvariantViolation


def watch_callbacks(
    loop: asyncio.AbstractEventLoop, on_invariant: Callable[[InvariantViolation], None]
) -> None:
    """Tell `on_invariant` of each violation that a callback of `loop` raises; all is logged as before.

    A panic of native code, which is no `Exception`, is one: nobody knows what the callback has left undone.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, InvariantViolation):
            on_invariant(error)
        elif isinstance(error, BaseException) and not isinstance(error, Exception | asyncio.CancelledError):
            on_invariant(InvariantViolation(f"a callback broke: {type(error).__name__}: {error}"))

    loop.set_exception_handler(handle)


def raise_on(loop: asyncio.AbstractEventLoop, error: InvariantViolation) -> None:
    """Raise a violation in a callback of `loop`; called on any thread."""
    loop.call_soon_threadsafe(_raise, error)


def raise_break(loop: asyncio.AbstractEventLoop, thread: str, cause: BaseException) -> None:
    """Raise on `loop` that a thread of ours has ended by an error; called by that thread, last."""
    error = InvariantViolation(f"the {thread} broke: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    raise_on(loop, error)


def _raise(error: InvariantViolation) -> None:
    raise error
