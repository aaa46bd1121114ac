"""Runs coroutines side by side until the first of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_end(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, cancel the others, wait for their end, and raise what the first one raised.

    When this is cancelled, all are.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
