"""The order in which the one engine takes the jobs of all sessions."""

import asyncio
from dataclasses import dataclass

from prefill_service.queue import JobQueue
from tests.support.prefill_peers import turns


@dataclass(frozen=True, slots=True)
class Named:
    """A job that is nothing but its name."""

    key: tuple[int, int]


FIRST, SECOND, THIRD = Named((1, 7)), Named((2, 7)), Named((1, 8))


def make_queue() -> JobQueue[Named]:
    """Return a queue of three jobs of two sessions with equal transfer ids."""
    queue: JobQueue[Named] = JobQueue()
    for job in (FIRST, SECOND, THIRD):
        queue.put(job)
    return queue


async def test_jobs_of_all_sessions_are_taken_in_order_of_arrival() -> None:
    """First come, first served, whoever asks."""
    queue = make_queue()

    assert [await queue.take() for _ in range(3)] == [FIRST, SECOND, THIRD]
    assert len(queue) == 0


async def test_a_job_is_removed_by_session_and_transfer() -> None:
    """Two sessions may use equal transfer ids."""
    queue = make_queue()

    queue.remove((2, 7))

    assert [await queue.take() for _ in range(2)] == [FIRST, THIRD]


def test_removing_what_is_not_queued_does_nothing() -> None:
    """A cancel may meet the engine."""
    queue = make_queue()

    queue.remove((2, 8))

    assert len(queue) == 3


async def test_whoever_watches_hears_of_each_job_that_leaves() -> None:
    """Taken or removed, once each, and not of what was never there."""
    queue, lengths = make_queue(), list[int]()
    queue.watch(lambda: lengths.append(len(queue)))

    await queue.take()
    queue.remove(FIRST.key)
    queue.remove(THIRD.key)

    assert lengths == [2, 1]


async def test_a_consumer_waits_until_there_is_a_job() -> None:
    """Removed jobs wake nobody."""
    queue: JobQueue[Named] = JobQueue()
    taker = asyncio.create_task(queue.take())
    await turns()
    queue.put(FIRST)
    queue.remove(FIRST.key)
    await turns()
    assert not taker.done()

    queue.put(SECOND)

    assert await taker == SECOND
