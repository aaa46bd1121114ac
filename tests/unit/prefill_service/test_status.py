"""What an operator is told of a prefill service."""

import asyncio
from dataclasses import replace

import pytest

from common.session.messages import CancelPrefill, Ping, PrefillAccepted, ReleaseSpan, TransferMode
from common.wire.interceptor import CallStatistics
from kvspan.v1 import transfer_pb2 as pb
from prefill_service.job import Job
from prefill_service.status import status_to_proto
from tests.support.prefill_peers import SLAB_BYTES, PeerDesk
from tests.support.sessions import make_start

pytestmark = pytest.mark.usefixtures("leak_check")

SPAN_BYTES = 384
CALLS = CallStatistics(num_exhausted=5, num_broken=3)


def status_of(desk: PeerDesk, running: Job | None = None) -> pb.PrefillServiceGetStatusResponse:
    """Return the status of a service with this one session."""
    return status_to_proto(desk.context, [desk.peer], running, CALLS)


async def test_an_idle_service_says_who_it_is_and_that_nothing_runs(desk: PeerDesk) -> None:
    """A session before its Hello has no name and no slab."""
    status = status_of(desk)

    assert (status.boot_id, status.num_queued, status.HasField("running")) == ("prefill-boot", 0, False)
    assert (status.calls.exhausted, status.calls.broken, status.HasField("journal")) == (5, 3, False)
    (session,) = status.sessions
    assert session == pb.PrefillSessionStatus(
        session=3, state=pb.PREFILL_SESSION_STATE_WAITING, ignored=pb.IgnoredCounts()
    )


async def test_a_session_says_what_it_has_queued_running_and_pinned(desk: PeerDesk) -> None:
    """And whether it goes last."""
    await desk.greet()
    for transfer_id in (21, 22, 23):
        await desk.start(transfer_id)
    job = desk.take()
    desk.queue.put_last(3)

    status = status_of(desk, job)

    assert status.num_queued == 2
    assert status.sessions[0] == pb.PrefillSessionStatus(
        session=3,
        peer_boot_id="decode-boot",
        state=pb.PREFILL_SESSION_STATE_OPEN,
        slab_bytes=SLAB_BYTES,
        pinned_bytes=3 * 8192,
        num_queued=2,
        num_running=1,
        goes_last=True,
        ignored=pb.IgnoredCounts(),
    )
    await desk.run(job)


async def test_the_running_prompt_is_named_as_in_the_logs(desk: PeerDesk) -> None:
    """And for how long the engine has it, by the clock of the service."""
    await desk.greet()
    desk.peer.receive(replace(make_start(21), request_id="7f-\n12"))
    job = desk.take()
    job.started_ns = 4

    running = status_of(desk, job).running

    assert (running.request_id, running.session, running.transfer_id) == ("7f-12", 3, 21)
    assert (running.num_tokens, running.phase) == (5, pb.PREFILL_PHASE_COMPUTING)
    assert (running.run_time.ToNanoseconds(), running.HasField("wait_time")) == (10 - 4, False)
    await desk.run(job)


async def test_a_prompt_begun_after_the_look_at_the_clock_has_run_for_no_time(desk: PeerDesk) -> None:
    """Its thread may begin in that moment; a time below zero would be a lie."""
    await desk.greet()
    desk.peer.receive(make_start(21))
    job = desk.take()
    job.started_ns = 11

    assert status_of(desk, job).running.run_time.ToNanoseconds() == 0

    await desk.run(job)


async def test_a_prompt_that_waits_for_credit_is_shown_so(desk: PeerDesk) -> None:
    """With the spans that decode has not released."""
    await desk.greet()
    desk.peer.receive(replace(make_start(21), slot_size=SPAN_BYTES, mode=TransferMode.STREAM))
    assert isinstance(await desk.peer.next_message(), PrefillAccepted)
    job = desk.take()
    run = asyncio.create_task(desk.run(job))
    await desk.peer.next_message()
    # The engine's thread says nothing when it begins to wait: there is no event to wait for.
    while not job.is_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.001)

    status = status_of(desk, job)

    assert status.running.phase == pb.PREFILL_PHASE_WAITING_FOR_CREDIT
    assert status.running.HasField("wait_time")
    assert status.sessions[0].num_sealed_spans == 1
    desk.cancel()
    await run


async def test_totals_outlive_their_session(desk: PeerDesk) -> None:
    """What was ignored too; nothing is counted twice while the session lives."""
    await desk.greet()
    start = await desk.start(21)
    desk.peer.receive(start)
    desk.peer.receive(ReleaseSpan(21, 1, 9))
    desk.peer.receive(CancelPrefill(20, 1, "late"))
    desk.peer.receive(Ping(1))
    await desk.run(desk.take())
    await desk.start(22)
    before = status_of(desk).totals

    desk.peer.close()

    after = status_to_proto(desk.context, [], None, CALLS).totals
    ignored = pb.IgnoredCounts(unknown_messages=1, repeated_starts=1, ignored_releases=1)
    assert (before.ignored, after.ignored) == (ignored, ignored)
    assert (before.accepted, before.done, before.abandoned) == (2, 1, 0)
    assert (after.accepted, after.done, after.abandoned, after.sealed_spans) == (2, 1, 1, 6)
    assert (before.sessions_ended, after.sessions_opened, after.sessions_ended) == (0, 1, 1)
