"""One session of the decode service: what it says, holds, gives back and abandons."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import (
    Cancelled,
    ChecksumMismatch,
    EngineFailed,
    InvariantViolation,
    LocalProtocolError,
    PeerLost,
    PrefillEngineFailed,
)
from common.session import messages
from common.session.messages import CancelPrefill, Hello, ReleaseSpan, SourceTimings
from common.telemetry.timeline import Timeline
from decode_service.cache.reservation import Holder
from tests.support.decode_sessions import (
    REQUEST,
    STATES,
    Making,
    SessionDesk,
    complete,
    make_session_desk,
    streaming,
)
from tests.support.sessions import make_logits, make_welcome

pytestmark = pytest.mark.usefixtures("leak_check")

CAUSE = Cancelled("by the client")
LOST = PeerLost("the stream broke")


async def test_a_welcome_opens_the_session_and_unlinks_the_slab(slab_dir: Path) -> None:
    """From then on not even a sudden death leaves a file."""
    with make_session_desk(slab_dir) as desk:
        desk.session.greet()
        (hello,) = await desk.said()
        assert isinstance(hello, Hello)
        assert os.listdir(slab_dir) == [hello.slab.name]

        desk.session.receive(replace(make_welcome(), nonce=desk.slab.nonce))

        assert desk.session.is_open
        assert os.listdir(slab_dir) == []
        assert desk.num_changes == 1


async def test_a_start_names_the_slot_and_the_whole_prompt(desk: SessionDesk) -> None:
    """The producer holds the pages from before the message is sent."""
    transfer = await desk.begin()

    start = transfer.start
    assert (start.token_ids, start.first_tokens, start.mode) == (REQUEST.prompt_ids, (0,), REQUEST.mode)
    assert (start.slot_offset, start.slot_size, desk.num_slots) == (4096, 8192, 1)
    assert transfer.reservation.holders == {Holder.CLIENT, Holder.PRODUCER}


async def test_transfer_ids_are_never_used_twice(desk: SessionDesk) -> None:
    """The client's name for its request is no key."""
    first, second = await desk.begin(), await desk.begin()

    assert first.start.transfer_id != second.start.transfer_id
    assert first.start.request_id == second.start.request_id


@pytest.mark.parametrize(("waited_s", "limit_s"), [(0, 30.0), (7, 23.0), (30, 0.001), (90, 0.001)])
async def test_the_producer_is_told_what_is_left_of_the_time(
    desk: SessionDesk, waited_s: int, limit_s: float
) -> None:
    """Time in the queue is spent, and what is told is a duration above zero."""
    transfer = await desk.begin(waited_s)

    assert transfer.start.time_limit_s == limit_s


async def test_a_span_is_imported_from_the_slab_into_its_pages(desk: SessionDesk) -> None:
    """The bytes of the span and the table of its group."""
    transfer = await desk.begin()
    desk.accept(transfer)
    span = transfer.spans[3]
    desk.slab.view(span.offset, span.length)[:] = bytes([7]) * span.length

    desk.tell(transfer, [span])

    (job,) = desk.importer.jobs
    assert bytes(job.source) == bytes([7]) * span.length
    assert job.table == transfer.reservation.pages.tables[0]
    desk.importer.finish()
    assert await desk.said() == [ReleaseSpan(transfer.start.transfer_id, 1, span.sequence)]


async def test_a_complete_transfer_proves_itself_and_settles(desk: SessionDesk) -> None:
    """Its logits become readable, its slot comes back, its pages stay with the client."""
    transfer = await complete(desk)
    await transfer.prefill.wait()
    changes = desk.num_changes

    logits_V = transfer.prefill.prove_complete()
    transfer.prefill.settle()

    assert np.array_equal(logits_V, np.frombuffer(make_logits(), "<f4"))
    assert [record.sequence for record in transfer.timeline.spans] == list(range(6))
    assert desk.num_slots == 0
    assert transfer.reservation.holders == {Holder.CLIENT}
    assert desk.num_changes > changes


async def make_timed(desk: SessionDesk, timings: SourceTimings) -> Timeline:
    """Return the marks of a transfer asked for at 5000, or when it is, and done 900 ns later."""
    transfer = await desk.begin()
    desk.accept(transfer)
    desk.clock.advance_ns(900)
    desk.tell(transfer)
    desk.end(transfer, timings)
    desk.importer.finish()
    transfer.prefill.abort(CAUSE)
    return transfer.timeline


async def test_the_engine_s_times_become_marks_of_the_request(desk: SessionDesk) -> None:
    """As the producer tells them, when they lie between StartPrefill and the receipt of Done."""
    timeline = await make_timed(desk, SourceTimings(5_100, 5_200, 5_800))

    assert (timeline.source_started_ns, timeline.source_ended_ns) == (5_200, 5_800)
    assert (timeline.has_clock_error, desk.session.transfers.num_clock_errors) == (False, 0)


async def test_times_that_cannot_be_true_are_marked_and_logged_once(
    desk: SessionDesk, caplog: pytest.LogCaptureFixture
) -> None:
    """Y25: decode's own moments take their place; each answer counts, one line in the log is enough."""
    first = await make_timed(desk, SourceTimings(5_100, 5_800, 5_200))
    second = await make_timed(desk, SourceTimings(0, 0, 0))

    assert (first.source_started_ns, first.source_ended_ns) == (5_000, 5_900)
    assert (second.source_started_ns, second.source_ended_ns) == (5_900, 6_800)
    assert (first.has_clock_error, second.has_clock_error) == (True, True)
    assert desk.session.transfers.num_clock_errors == 2
    assert [record.getMessage() for record in caplog.records].count("clock.wrong") == 1


@pytest.mark.parametrize("making", STATES[:3])
async def test_nothing_is_proven_before_everything_has_arrived(desk: SessionDesk, making: Making) -> None:
    """No early publication, whoever asks for it."""
    transfer = await making(desk)

    with pytest.raises(InvariantViolation, match="not complete"):
        transfer.prefill.prove_complete()
    transfer.prefill.abort(CAUSE)


@pytest.mark.parametrize("making", STATES)
async def test_a_transfer_given_up_proves_nothing(desk: SessionDesk, making: Making) -> None:
    """The error that ended it comes back instead."""
    transfer = await making(desk)

    transfer.prefill.abort(CAUSE)

    with pytest.raises(Cancelled):
        transfer.prefill.prove_complete()


async def test_a_copy_that_fails_fails_its_transfer(desk: SessionDesk) -> None:
    """The producer is told to stop, and waited for."""
    transfer, error = await streaming(desk), ChecksumMismatch(0, "aa", "bb")

    desk.importer.fail(error)

    assert await desk.said() == [CancelPrefill(transfer.start.transfer_id, 1, error.code)]
    with pytest.raises(ChecksumMismatch):
        await transfer.prefill.wait()
    desk.importer.finish()
    assert desk.num_slots == 1
    desk.cancelled(transfer)
    assert desk.num_slots == 0


async def test_a_failure_of_the_engine_reaches_the_request(desk: SessionDesk) -> None:
    """With reason and text, and as the proof that the engine writes no more."""
    transfer = await streaming(desk)
    desk.importer.finish()

    desk.session.receive(
        messages.PrefillFailed(transfer.start.transfer_id, 1, EngineFailed.code, "a device was lost")
    )

    with pytest.raises(PrefillEngineFailed, match="a device was lost"):
        await transfer.prefill.wait()
    assert desk.num_slots == 0


async def test_a_start_in_a_closed_session_gives_the_slot_back(desk: SessionDesk) -> None:
    """What was granted just before the loss is not lost."""
    slot, (reservation, _) = desk.session.slots.lease(64), desk.reserve()
    desk.session.close(LOST)

    with pytest.raises(LocalProtocolError):
        desk.session.transfers.begin(REQUEST, reservation, slot, Timeline(0))

    assert desk.num_slots == 0
    assert reservation.holders == {Holder.CLIENT}
