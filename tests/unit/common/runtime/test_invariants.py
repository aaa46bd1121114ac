"""Broken invariants on threads and in callbacks reach the service."""

import asyncio
import logging

import pytest

from common.errors import InvariantViolation
from common.runtime.invariants import raise_on, watch_callbacks


@pytest.fixture
async def seen(caplog: pytest.LogCaptureFixture) -> asyncio.Queue[InvariantViolation]:
    """What the service is told."""
    caplog.set_level(logging.CRITICAL)
    seen: asyncio.Queue[InvariantViolation] = asyncio.Queue()
    watch_callbacks(asyncio.get_running_loop(), seen.put_nowait)
    return seen


async def test_a_violation_on_a_thread_reaches_the_service(seen: asyncio.Queue[InvariantViolation]) -> None:
    """Whoever finds it does not have to be a task that somebody waits for."""
    error = InvariantViolation("a page was lost")

    await asyncio.to_thread(raise_on, asyncio.get_running_loop(), error)

    assert await seen.get() is error


async def test_a_panic_in_a_callback_reaches_the_service(seen: asyncio.Queue[InvariantViolation]) -> None:
    """Native code raises what is no `Exception`; nobody knows what was left undone."""

    class Panic(BaseException):
        pass

    def callback() -> None:
        raise Panic("out of bounds")

    asyncio.get_running_loop().call_soon(callback)

    assert str(await seen.get()) == "a callback broke: Panic: out of bounds"


async def test_another_error_of_a_callback_is_only_logged(
    seen: asyncio.Queue[InvariantViolation],
) -> None:
    """A library may have bugs of its own."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    loop.call_soon("".index, "x")
    loop.call_soon(told.set)
    await told.wait()

    assert seen.empty()
