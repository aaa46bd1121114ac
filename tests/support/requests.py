"""Requests beside a test, and an engine that is held while they run."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from common.kv.ranges import Range
from decode_service.request import Request, RequestCounts
from tests.support.fakes import PatternEngine
from tests.support.memory_pair import MemoryPair
from tests.support.pair import WAIT_S


def counts_of(pair: MemoryPair) -> RequestCounts:
    """Return the counts without the routes."""
    return replace(pair.core.counts, prompts_remote=0, prompts_local=0)


class Gate:
    """Holds an engine at its first layer until it is opened."""

    def __init__(self, engine: PatternEngine) -> None:
        self._entered, self._open = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def on_layer(chunk: Range, layer: int) -> None:
            loop.call_soon_threadsafe(self._entered.set)
            self._open.wait(WAIT_S)  # a test that failed before it opened must not hang in its end

        engine.on_layer = on_layer

    async def entered(self) -> None:
        """Wait until the engine stands at the gate."""
        await self._entered.wait()

    def open(self) -> None:
        """Let everything pass from now on."""
        self._open.set()


def start(pair: MemoryPair, request: Request) -> asyncio.Task[list[str]]:
    """Run a request beside the test; gives its texts."""

    async def run() -> list[str]:
        return [event.text for event in await pair.generate(request)]

    return asyncio.create_task(run())
