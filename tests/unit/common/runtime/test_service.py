"""Tests of `common/runtime/service.py`."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import InvariantViolation
from common.runtime.service import Service


class Idle(Service):
    """A service with one task that ends when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.num_stopped = 0

    async def start(self) -> str:
        """Begin the task."""
        self._tasks = [asyncio.create_task(self._work())]
        return "here"

    async def stop(self) -> None:
        """End the task."""
        self.num_stopped += 1
        self._tasks[0].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def remove_files(self) -> None:
        """There are none."""

    async def _work(self) -> None:
        await self.may_end.wait()


async def test_a_service_is_stopped_when_it_is_told_to_end() -> None:
    """Once, and nothing is raised."""
    service, ending = Idle(), asyncio.Event()
    await service.start()
    ending.set()

    await service.run_until(ending)

    assert service.num_stopped == 1


async def test_a_service_is_stopped_when_nobody_can_be_told_that_it_is_ready() -> None:
    """It would leave its socket behind."""
    service = Idle()

    def announce(address: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await service.start_telling(announce)

    assert service.num_stopped == 1


async def test_a_service_is_stopped_when_a_task_of_it_ends() -> None:
    """What is left could not serve."""
    service = Idle()
    await service.start()
    service.may_end.set()

    await service.run_until(asyncio.Event())

    assert service.num_stopped == 1


async def test_the_first_broken_invariant_stops_a_service_and_is_raised() -> None:
    """A later one may be its consequence."""
    service = Idle()
    await service.start()
    service.break_off(InvariantViolation("first"))
    service.break_off(InvariantViolation("second"))

    with pytest.raises(InvariantViolation, match="first"):
        await service.run_until(asyncio.Event())

    assert service.num_stopped == 1
