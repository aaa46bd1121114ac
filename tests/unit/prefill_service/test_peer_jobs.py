"""The jobs of one session: how they wait, and whose turn comes when they have ended."""

import pytest

from common.errors import EngineFailed, InvariantViolation, LeaseExpired
from tests.support.prefill_peers import PeerDesk

pytestmark = pytest.mark.usefixtures("leak_check")


async def test_a_session_whose_job_found_no_credit_goes_last_until_a_job_of_it_ends_well(
    desk: PeerDesk,
) -> None:
    """A job that ends in another way says nothing about it."""
    await desk.greet()
    for transfer_id in (21, 22, 23):
        await desk.start(transfer_id)
    is_last = [desk.is_last]

    for error in (LeaseExpired("no credit"), EngineFailed("a device was lost")):
        job = desk.take()
        job.target.memory.release()
        desk.peer.finish(job, error)
        is_last.append(desk.is_last)
    await desk.run(desk.take())

    assert [*is_last, desk.is_last] == [False, True, True, False]


async def test_a_session_that_went_last_is_forgotten_with_its_end(desk: PeerDesk) -> None:
    """Nothing is kept of a session that is gone."""
    await desk.greet()
    desk.queue.put_last(desk.peer.number)

    desk.peer.close()

    assert not desk.is_last


async def test_a_job_without_its_timer_is_found(desk: PeerDesk) -> None:
    """It could hold its slot for ever."""
    await desk.greet()
    await desk.start(21)
    timer = desk.peer._jobs._timers.pop(21)

    with pytest.raises(InvariantViolation, match=r"1 jobs live, but \(jobs, timers\) are \(1, 0\)"):
        desk.peer.check_integrity()

    desk.peer._jobs._timers[21] = timer
