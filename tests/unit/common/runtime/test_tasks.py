"""Tests of `common/runtime/tasks.py`."""

from __future__ import annotations

import asyncio

import pytest

from common.runtime.tasks import first_end


async def test_others_are_cancelled_and_awaited_when_one_ends() -> None:
    """Nothing is left running behind the caller."""
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def ends() -> None:
        await asyncio.sleep(0)

    await first_end(waits(), ends())

    assert ended == ["waits"]


async def test_error_of_the_first_end_is_raised() -> None:
    """The caller learns why the first one ended."""

    async def waits() -> None:
        await asyncio.Event().wait()

    async def fails() -> None:
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason"):
        await first_end(waits(), fails())


async def test_all_are_cancelled_when_the_caller_is() -> None:
    """A cancelled caller leaves nothing behind either."""
    ended: list[int] = []

    async def waits(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    task = asyncio.create_task(first_end(waits(1), waits(2)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sorted(ended) == [1, 2]
