"""The order in which the one engine takes the jobs of all sessions."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from common.errors import InvariantViolation
from prefill_service.queue import MAX_PASSED, JobQueue


@dataclass(frozen=True, slots=True)
class Named:
    """A job that is nothing but its name."""

    key: tuple[int, int]


FIRST, SECOND, THIRD = (1, 7), (2, 7), (1, 8)


def make_queue(keys: Iterable[tuple[int, int]] = (FIRST, SECOND, THIRD)) -> JobQueue[Named]:
    """Return a queue of jobs in this order of arrival."""
    queue: JobQueue[Named] = JobQueue()
    for key in keys:
        queue.put(Named(key))
    return queue


def take(queue: JobQueue[Named], count: int) -> list[tuple[int, int] | None]:
    """Take some jobs and return their names."""
    taken = [queue.take() for _ in range(count)]
    queue.check_integrity()
    return [job.key if job else None for job in taken]


def test_jobs_of_a_session_are_taken_in_order_of_arrival() -> None:
    """First come, first served, whatever their names; then there is none."""
    assert take(make_queue([(1, 9), (1, 7), (1, 8)]), 4) == [(1, 9), (1, 7), (1, 8), None]


def test_sessions_take_turns() -> None:
    """One that brings many prompts at once does not put the others behind all of them."""
    queue = make_queue([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])

    assert take(queue, 6) == [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3)]


def test_who_comes_while_a_job_is_computed_goes_before_its_session() -> None:
    """The session whose turn it is has more waiting, and had its turn."""
    queue = make_queue([(1, 1), (1, 2)])

    assert take(queue, 1) == [(1, 1)]
    queue.put(Named((2, 1)))

    assert take(queue, 2) == [(2, 1), (1, 2)]


def test_a_session_that_comes_back_goes_behind_those_that_wait() -> None:
    """Coming one by one gives no more turns than coming all at once."""
    queue = make_queue([(1, 1), (2, 1), (2, 2), (3, 1)])

    assert take(queue, 1) == [(1, 1)]
    queue.put(Named((1, 2)))

    assert take(queue, 4) == [(2, 1), (3, 1), (1, 2), (2, 2)]


def test_a_session_that_is_last_goes_when_nobody_else_waits() -> None:
    """However early it came."""
    queue = make_queue([(1, 1), (2, 1), (2, 2)])

    assert queue.put_last(1)

    assert take(queue, 3) == [(2, 1), (2, 2), (1, 1)]


def test_a_session_that_is_last_is_passed_by_so_many_jobs_and_no_more() -> None:
    """Else sessions that are never idle would starve it; and so on, turn by turn."""
    queue = make_queue([(1, 1), (1, 2), *((2, number) for number in range(30))])
    queue.put_last(1)

    sessions = [key and key[0] for key in take(queue, 2 * (MAX_PASSED + 1))]

    assert sessions == 2 * [*MAX_PASSED * [2], 1]


def test_sessions_that_are_last_take_turns_among_themselves() -> None:
    """None of them goes last of the last."""
    queue = make_queue([(1, 1), (1, 2), (2, 1), (2, 2)])
    queue.put_last(1)
    queue.put_last(2)

    assert take(queue, 4) == [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("forgives", [JobQueue.put_in_turn, JobQueue.forget])
def test_a_session_that_was_last_takes_turns_again(forgives: object) -> None:
    """It has behaved, or another has its number."""
    queue = make_queue([(1, 1), (2, 1), (2, 2)])
    queue.put_last(1)

    forgives(queue, 1)  # type: ignore[operator]

    assert not queue.is_last(1)
    assert take(queue, 3) == [(1, 1), (2, 1), (2, 2)]


def test_being_put_last_twice_is_being_put_last_once() -> None:
    """Whoever asks hears whether anything changed."""
    queue = make_queue()

    assert [queue.put_last(1), queue.put_last(1)] == [True, False]
    assert [queue.put_in_turn(1), queue.put_in_turn(1)] == [True, False]


def test_a_job_is_removed_by_session_and_transfer() -> None:
    """Two sessions may use equal transfer ids."""
    queue = make_queue()

    queue.remove(SECOND)

    assert take(queue, 3) == [FIRST, THIRD, None]


def test_removing_what_is_not_queued_does_nothing() -> None:
    """A cancel may meet the engine."""
    queue = make_queue()

    queue.remove((2, 8))
    queue.remove((3, 7))

    assert len(queue) == 3


def test_a_session_is_no_other_to_itself() -> None:
    """Whoever keeps the engine waiting keeps it from others only."""
    queue = make_queue([FIRST, THIRD])

    assert [queue.others_wait(session) for session in (1, 2)] == [False, True]


def test_whoever_watches_hears_of_each_job_that_comes_or_leaves() -> None:
    """Put, taken or removed, once each, and not of what was never there."""
    queue, lengths = make_queue(), list[int]()
    queue.watch(lambda: lengths.append(len(queue)))

    queue.put(Named((3, 1)))
    queue.take()
    queue.remove(FIRST)
    queue.remove(THIRD)

    assert lengths == [4, 3, 2]


def test_a_job_that_changed_its_name_is_found() -> None:
    """It could never be removed."""
    queue = make_queue()
    job = queue._waiting[1].pop(7)
    queue._waiting[1][9] = job

    with pytest.raises(InvariantViolation, match="session 1"):
        queue.check_integrity()
