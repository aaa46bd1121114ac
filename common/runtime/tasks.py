"""Runs coroutines side by side until the first of them ends, and blocking work beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

Made = TypeVar("Made")
Given = ParamSpec("Given")


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
    try:
        for task in done:
            task.result()
    finally:
        del task, tasks, done  # what is raised holds this frame: it must not hold what is raised


@contextmanager
def listed(tasks: set[asyncio.Task[Any]]) -> Iterator[None]:
    """Have the task that enters this among `tasks` until it leaves it."""
    task = asyncio.current_task()
    assert task is not None
    tasks.add(task)
    try:
        yield
    finally:
        tasks.discard(task)


async def make_in_thread(make: Callable[[], Made], unmake: Callable[[Made], object]) -> Made:
    """Return what `make` returns on a thread of its own: one that waits for a stranger takes nobody's turn.

    When cancelled meanwhile, this ends only after what was made is unmade: a thread cannot be stopped.
    """
    threads = ThreadPoolExecutor(1, thread_name_prefix="making")
    making = asyncio.get_running_loop().run_in_executor(threads, run_to_end, make)
    threads.shutdown(wait=False)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        if making.exception() is None:
            unmake(making.result())
        raise


class SideWork:
    """Runs blocking work on other threads, so much of it at a time; the rest waits in order of arrival.

    Ownership: event loop only; the threads are those of the loop's default executor.
    """

    def __init__(self, limit: int) -> None:
        self._places = asyncio.Semaphore(limit)

    async def run(self, work: Callable[[], Made]) -> Made:
        """Return what `work` returns.

        When cancelled, this ends at once; work that has begun goes on for nobody, and keeps its place.
        """
        await self._places.acquire()
        doing = asyncio.get_running_loop().run_in_executor(None, run_to_end, work)
        doing.add_done_callback(self._ended)
        return await asyncio.shield(doing)

    def _ended(self, done: asyncio.Future[Any]) -> None:
        self._places.release()
        if not done.cancelled():
            done.exception()  # else it would be logged as never looked at


def run_to_end(work: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs) -> Made:
    """Return what `work` returns; for code that runs on a thread while a future of the event loop waits.

    Such a future cannot take a `StopIteration` and would never end, so `RuntimeError` is raised in its place.
    """
    try:
        return work(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"raised {type(error).__name__}({error})") from error
