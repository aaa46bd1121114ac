"""The life of a service in its process: served until a signal or a broken invariant, then stopped.

Ownership: one per process, made by its composition root on the event loop that it belongs to.
Not here: what a service opens and closes (`prefill_service/app.py`, `decode_service/app.py`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from common.errors import InvariantViolation
from common.runtime.descriptors import raise_limit
from common.runtime.invariants import watch_callbacks
from common.runtime.lifecycle import Lifecycle
from common.runtime.threads import share_interpreter


class Service(ABC):
    """What both services have in common; each opens and closes parts of its own."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        # Invariant: made by `start`, ended by `stop`; one that ends earlier ends the service.
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Invariant: set to an InvariantViolation or not at all.

    @abstractmethod
    async def start(self) -> str:
        """Serve, and return the address."""

    @abstractmethod
    async def stop(self) -> None:
        """Refuse what comes and end everything; raises what ended a task early."""

    @abstractmethod
    def remove_files(self) -> None:
        """Remove what has a name in a file system at once; the process is about to end without stopping."""

    async def serve(self, on_ready: Callable[[str], None]) -> None:
        """Serve until SIGTERM or SIGINT; call `on_ready` with the bound address once calls are taken."""
        share_interpreter()
        raise_limit()
        watch_callbacks(asyncio.get_running_loop(), self.break_off)
        with Lifecycle() as lifecycle:
            lifecycle.before_exit(self.remove_files)
            await self.start_telling(on_ready)
            await self.run_until(lifecycle.ending)

    async def start_telling(self, on_ready: Callable[[str], None]) -> None:
        """Start and tell the address; stop when nobody can be told, and raise why."""
        address = await self.start()
        try:
            on_ready(address)
        except BaseException:
            await self.stop()
            raise

    async def run_until(self, ending: asyncio.Event) -> None:
        """Serve until `ending` is set, a task ends or an invariant breaks, then stop."""
        waiting = asyncio.create_task(ending.wait())
        ends: set[asyncio.Future[Any]] = {waiting, self._broken, *self._tasks}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await self.stop()
        if self._broken.done():
            self._broken.result()

    def break_off(self, error: InvariantViolation) -> None:
        """End the service: an invariant is broken, so nothing it holds can be trusted."""
        if not self._broken.done():
            self._broken.set_exception(error)
