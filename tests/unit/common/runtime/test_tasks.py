"""Tests of `common/runtime/tasks.py`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from typing import NoReturn

import pytest

from common.runtime.tasks import SideWork, first_end, make_in_thread, run_to_end

LONG_S = 20.0
"""Longest time a thread of a test may take; it takes microseconds."""


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


async def test_what_is_made_waits_for_nobody_else() -> None:
    """Strangers that keep any number of threads waiting do not keep the next one from its turn."""
    is_over = threading.Event()
    waiting = [asyncio.create_task(make_in_thread(is_over.wait, lambda made: None)) for _ in range(40)]
    await asyncio.sleep(0)

    async with asyncio.timeout(LONG_S):
        assert await make_in_thread(lambda: 7, lambda made: None) == 7

    is_over.set()
    await asyncio.gather(*waiting)


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


async def test_an_error_keeps_nothing_alive_once_it_was_handled() -> None:
    """A socket in the frames of an error would stay open until the collector runs."""

    class Held:
        pass

    references: list[weakref.ref[Held]] = []

    async def fails() -> None:
        held = Held()
        references.append(weakref.ref(held))
        raise KeyError("reason")

    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            await first_end(fails(), asyncio.Event().wait())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert [reference() for reference in references] == [None]
    finally:
        gc.enable()


async def test_what_a_thread_makes_is_returned() -> None:
    """And made on another thread."""
    unmade: list[int] = []

    assert await make_in_thread(threading.get_ident, unmade.append) != threading.get_ident()
    assert unmade == []


async def test_what_a_thread_makes_for_nobody_is_unmade_before_the_cancelled_call_ends() -> None:
    """A thread cannot be stopped, so its caller waits for it (rule 9)."""
    go_on, unmade = threading.Event(), list[int]()

    def make() -> int:
        go_on.wait(30)
        return 6

    making = asyncio.create_task(make_in_thread(make, unmade.append))
    await asyncio.sleep(0)
    making.cancel()
    await asyncio.sleep(0)
    assert not making.done()
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await making
    assert unmade == [6]


async def test_an_error_of_the_thread_is_raised_unless_the_caller_has_gone() -> None:
    """Nothing was made, so nothing is unmade."""

    def fails() -> int:
        raise KeyError("reason")

    unmade: list[int] = []
    with pytest.raises(KeyError, match="reason"):
        await make_in_thread(fails, unmade.append)

    making = asyncio.create_task(make_in_thread(fails, unmade.append))
    await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert unmade == []


async def test_a_future_ends_when_its_thread_raises_stop_iteration() -> None:
    """Without the door such a future never ends, and whoever waits for it waits for ever."""

    def fails(reason: str) -> NoReturn:
        raise StopIteration(reason)

    work = asyncio.get_running_loop().run_in_executor(None, run_to_end, fails, "no more")
    await asyncio.wait([work], timeout=LONG_S)

    assert work.done()
    with pytest.raises(RuntimeError, match=r"raised StopIteration\(no more\)"):
        work.result()


async def test_making_in_a_thread_ends_when_it_raises_stop_iteration() -> None:
    """The caller hears of it like of any other error."""

    def fails() -> int:
        return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        async with asyncio.timeout(LONG_S):
            await make_in_thread(fails, lambda made: None)


def test_what_work_returns_or_raises_passes_the_door() -> None:
    """Only `StopIteration` is changed."""

    def fails() -> NoReturn:
        raise KeyError("reason")

    assert run_to_end(divmod, 7, 2) == (3, 1)
    with pytest.raises(KeyError, match="reason"):
        run_to_end(fails)


class Held:
    """Work that waits on its thread until it is let go."""

    def __init__(self, side: SideWork) -> None:
        self.begun, self._may_go, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

        def work() -> int:
            loop.call_soon_threadsafe(self.begun.set)
            assert self._may_go.wait(LONG_S)
            return threading.get_ident()

        self.task = asyncio.create_task(side.run(work))

    def let_go(self) -> None:
        """Let the work end."""
        self._may_go.set()


async def test_side_work_is_done_on_another_thread_while_the_loop_goes_on() -> None:
    """And its value or error comes back."""
    held = Held(SideWork(2))
    await held.begun.wait()
    held.let_go()

    assert await held.task != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await SideWork(2).run(lambda: 7 // 0)


async def test_side_work_beyond_the_limit_waits_for_a_place() -> None:
    """In order of arrival; who stops waiting leaves nothing behind."""
    side = SideWork(2)
    works = [Held(side) for _ in range(4)]
    await works[0].begun.wait()
    await works[1].begun.wait()
    assert not works[2].begun.is_set()

    works[2].task.cancel()
    works[0].let_go()
    await works[3].begun.wait()

    for held in works:
        held.let_go()
    await asyncio.wait([held.task for held in works])
    assert not works[2].begun.is_set()


async def test_cancelled_side_work_keeps_its_place_until_its_thread_has_ended() -> None:
    """A thread cannot be stopped; who cancels does not wait, and cannot start more than the limit."""
    side = SideWork(1)
    gone, waiting = Held(side), Held(side)
    await gone.begun.wait()

    gone.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone.task
    await asyncio.sleep(0)
    assert not waiting.begun.is_set()
    gone.let_go()

    await waiting.begun.wait()
    waiting.let_go()
    await waiting.task
