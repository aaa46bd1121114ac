"""One session of the decode service: what it says, holds, gives back and abandons."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import (
    Cancelled,
    ChecksumMismatch,
    EngineFailed,
    InvariantViolation,
    KVSpanError,
    LocalProtocolError,
    PeerLost,
    PrefillFailed,
    SlabNotShared,
)
from common.session import messages
from common.session.messages import CancelPrefill, Hello, ReleaseSpan
from common.telemetry.timeline import Timeline
from decode_service.peer_session import DRAIN_LIMIT_S
from decode_service.reservation import Holder
from tests.support.decode_sessions import (
    REQUEST,
    SLAB_BYTES,
    SessionDesk,
    Transfer,
    leave,
    make_session_desk,
)
from tests.support.sessions import TIMINGS, make_logits, make_welcome

pytestmark = pytest.mark.usefixtures("leak_check")

CAUSE = Cancelled("by the client")
LOST = PeerLost("the stream broke")


@pytest.fixture
async def desk(slab_dir: Path) -> AsyncIterator[SessionDesk]:
    """An open session; at the end it is closed and must leave nothing."""
    with make_session_desk(slab_dir) as desk:
        await desk.open()
        yield desk
        desk.session.check_integrity()
        if not desk.closed:
            desk.session.close(LOST)
        desk.importer.finish()
        assert desk.session.is_unmapped
        assert desk.num_slots == 0
        assert len(desk.closed) == 1


async def requested(desk: SessionDesk) -> Transfer:
    """A transfer that was sent."""
    return await desk.begin()


async def streaming(desk: SessionDesk) -> Transfer:
    """A transfer with two copies under way."""
    transfer = await desk.begin()
    desk.accept(transfer)
    desk.tell(transfer, transfer.spans[:2])
    return transfer


async def ending(desk: SessionDesk) -> Transfer:
    """A transfer whose producer is done and whose last copy is under way."""
    transfer = await desk.begin()
    desk.accept(transfer)
    desk.tell(transfer)
    desk.importer.finish(5)
    desk.end(transfer)
    return transfer


async def complete(desk: SessionDesk) -> Transfer:
    """A transfer that waits for its publication."""
    transfer = await ending(desk)
    desk.importer.finish()
    return transfer


Making = Callable[[SessionDesk], Awaitable[Transfer]]
STATES: tuple[Making, ...] = (requested, streaming, ending, complete)


async def test_a_welcome_opens_the_session_and_unlinks_the_slab(slab_dir: Path) -> None:
    """From then on not even a sudden death leaves a file."""
    with make_session_desk(slab_dir) as desk:
        desk.session.greet()
        (hello,) = await desk.said()
        assert isinstance(hello, Hello)
        assert os.listdir(slab_dir) == [hello.slab.name]
        assert not desk.session.can_lease(64)

        desk.session.receive(replace(make_welcome(), nonce=desk.slab.nonce))

        assert desk.session.is_open
        assert os.listdir(slab_dir) == []
        assert desk.num_changes == 1


async def test_a_welcome_with_another_nonce_is_refused(slab_dir: Path) -> None:
    """The peer sees other memory."""
    with make_session_desk(slab_dir) as desk:
        desk.session.greet()

        with pytest.raises(SlabNotShared):
            desk.session.receive(make_welcome())

        desk.session.close(LOST)
        assert desk.session.is_unmapped


async def test_a_start_names_the_slot_and_the_whole_prompt(desk: SessionDesk) -> None:
    """The producer holds the pages from before the message is sent."""
    transfer = await desk.begin()

    start = transfer.start
    assert (start.token_ids, start.first_token, start.mode) == (REQUEST.prompt_ids, 0, REQUEST.mode)
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

    assert np.array_equal(logits_V.numpy(), np.frombuffer(make_logits(), "<f4"))
    assert (transfer.timeline.source_started_ns, transfer.timeline.source_ended_ns) == (
        TIMINGS.started_ns,
        TIMINGS.ended_ns,
    )
    assert [record.sequence for record in transfer.timeline.spans] == list(range(6))
    assert desk.num_slots == 0
    assert transfer.reservation.holders == {Holder.CLIENT}
    assert desk.num_changes > changes


@pytest.mark.parametrize("making", STATES[:3])
async def test_nothing_is_proven_before_everything_has_arrived(desk: SessionDesk, making: Making) -> None:
    """No early publication, whoever asks for it."""
    transfer = await making(desk)

    with pytest.raises(InvariantViolation, match="not complete"):
        transfer.prefill.prove_complete()


@pytest.mark.parametrize("making", STATES)
async def test_a_transfer_given_up_proves_nothing(desk: SessionDesk, making: Making) -> None:
    """The error that ended it comes back instead."""
    transfer = await making(desk)

    transfer.prefill.abort(CAUSE)

    with pytest.raises(Cancelled):
        transfer.prefill.prove_complete()


async def test_a_cancel_before_any_answer_waits_for_the_producer(desk: SessionDesk) -> None:
    """The engine may be about to write."""
    transfer = await requested(desk)

    transfer.prefill.abort(CAUSE)
    leave(transfer)
    assert await desk.said() == [CancelPrefill(transfer.start.transfer_id, 1, CAUSE.code)]
    assert (transfer.is_free, desk.num_slots) == (False, 1)
    desk.cancelled(transfer)

    assert (transfer.is_free, desk.num_slots) == (True, 0)


@pytest.mark.parametrize("producer_first", [True, False])
async def test_a_cancel_while_streaming_waits_for_producer_and_copies(
    desk: SessionDesk, producer_first: bool
) -> None:
    """Both must have ended, in whichever order."""
    transfer = await streaming(desk)
    transfer.prefill.abort(CAUSE)
    leave(transfer)
    ends: list[Callable[[], None]] = [lambda: desk.cancelled(transfer), desk.importer.finish]

    first, second = ends if producer_first else reversed(ends)
    first()
    assert (transfer.is_free, desk.num_slots) == (False, 1)
    second()

    assert (transfer.is_free, desk.num_slots) == (True, 0)


async def test_a_cancel_after_done_waits_for_the_copy(desk: SessionDesk) -> None:
    """The producer has said its last word; nothing is asked of it."""
    transfer = await ending(desk)

    transfer.prefill.abort(CAUSE)
    leave(transfer)
    assert (transfer.is_free, desk.num_slots) == (False, 1)
    desk.importer.finish()

    assert (transfer.is_free, desk.num_slots) == (True, 0)


async def test_a_cancel_before_publication_frees_at_once(desk: SessionDesk) -> None:
    """Nothing moves any more."""
    transfer = await complete(desk)

    transfer.prefill.abort(CAUSE)
    leave(transfer)

    assert (transfer.is_free, desk.num_slots) == (True, 0)


@pytest.mark.parametrize("making", STATES)
async def test_giving_up_twice_is_giving_up_once(desk: SessionDesk, making: Making) -> None:
    """The first outcome stands, and nothing is freed twice."""
    transfer = await making(desk)
    transfer.prefill.abort(CAUSE)
    transfer.prefill.abort(LOST)
    desk.importer.finish()
    desk.cancelled(transfer)
    transfer.prefill.abort(LOST)
    leave(transfer)

    assert (transfer.is_free, desk.num_slots) == (True, 0)


@pytest.mark.parametrize("making", STATES)
async def test_a_lost_producer_fails_what_was_not_published(desk: SessionDesk, making: Making) -> None:
    """Pages come back with the last copy, and the slab is unmapped not earlier and not later."""
    transfer = await making(desk)
    leave(transfer)
    is_copying = bool(desk.importer.jobs)

    desk.session.close(LOST)

    assert (transfer.is_free, desk.session.is_unmapped) == (not is_copying, not is_copying)
    assert desk.num_mappings == int(is_copying)
    desk.importer.finish()
    assert (transfer.is_free, desk.session.is_unmapped, desk.num_mappings) == (True, True, 0)
    assert desk.closed == [LOST]


@pytest.mark.parametrize("making", STATES[:3])
async def test_the_call_that_waits_hears_of_the_loss(desk: SessionDesk, making: Making) -> None:
    """No wait without an end."""
    transfer = await making(desk)
    waiting = asyncio.create_task(transfer.prefill.wait())

    desk.session.close(LOST)

    with pytest.raises(PeerLost):
        await waiting


async def test_a_loss_between_completion_and_publication_is_the_peer_s_loss(desk: SessionDesk) -> None:
    """It fails the request and not the service: the pages were drained and never published."""
    transfer = await complete(desk)
    await transfer.prefill.wait()

    desk.session.close(LOST)

    with pytest.raises(PeerLost):
        transfer.prefill.prove_complete()


async def test_a_published_transfer_outlives_its_session(desk: SessionDesk) -> None:
    """Its pages are the sequence's; only slab bytes were the session's."""
    transfer = await complete(desk)
    transfer.prefill.prove_complete()
    transfer.prefill.settle()

    desk.session.close(LOST)

    assert not transfer.is_free
    leave(transfer)
    assert transfer.is_free


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

    with pytest.raises(PrefillFailed, match="a device was lost") as failure:
        await transfer.prefill.wait()
    assert failure.value.reason == EngineFailed.code
    assert desk.num_slots == 0


async def test_one_transfer_fails_alone(desk: SessionDesk) -> None:
    """Its neighbour completes."""
    broken, whole = await streaming(desk), await desk.begin()
    desk.importer.fail(ChecksumMismatch(0, "aa", "bb"))
    desk.accept(whole)
    desk.tell(whole)
    desk.end(whole)

    desk.importer.finish()

    await whole.prefill.wait()
    assert whole.prefill.prove_complete() is not None
    whole.prefill.settle()
    desk.cancelled(broken)


async def test_a_call_that_stopped_waiting_changes_nothing(desk: SessionDesk) -> None:
    """The outcome comes to nobody, and is no error of its own."""
    transfer = await streaming(desk)
    waiting = asyncio.create_task(transfer.prefill.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    desk.importer.fail(ChecksumMismatch(0, "aa", "bb"))
    desk.importer.finish()
    desk.cancelled(transfer)

    assert desk.num_slots == 0


async def test_slots_are_leased_while_the_session_is_open(desk: SessionDesk) -> None:
    """Up to the size of the slab, and never from one that is abandoned."""
    assert desk.session.slab_capacity == SLAB_BYTES - 4096
    assert desk.session.can_lease(SLAB_BYTES - 4096)
    assert not desk.session.can_lease(SLAB_BYTES - 4095)

    desk.session.close(LOST)

    assert not desk.session.can_lease(64)


async def test_a_slot_that_was_granted_counts_as_a_transfer(desk: SessionDesk) -> None:
    """Grants of one turn never start more than the peer takes (three)."""
    slots = [desk.session.lease(64) for _ in range(3)]
    assert not desk.session.can_lease(64)

    desk.session.give_back(slots[1])

    assert desk.session.can_lease(64)
    for slot in (slots[0], slots[2]):
        desk.session.give_back(slot)


async def test_a_start_in_a_closed_session_gives_the_slot_back(desk: SessionDesk) -> None:
    """What was granted just before the loss is not lost."""
    slot, (reservation, _) = desk.session.lease(64), desk.reserve()
    desk.session.close(LOST)

    with pytest.raises(LocalProtocolError):
        desk.session.begin(REQUEST, reservation, slot, Timeline(0))

    assert desk.num_slots == 0
    assert reservation.holders == {Holder.CLIENT}


@pytest.mark.parametrize("making", [requested, streaming])
async def test_a_transfer_that_never_drains_ends_the_session(desk: SessionDesk, making: Making) -> None:
    """The limit counts from the failure and is not moved by asking or by another cancel."""
    transfer = await making(desk)
    desk.clock.advance_s(100 * DRAIN_LIMIT_S)
    desk.session.check_drained()
    transfer.prefill.abort(CAUSE)

    for _ in range(10):
        desk.clock.advance_s(DRAIN_LIMIT_S / 10)
        transfer.prefill.abort(CAUSE)
        desk.session.check_drained()
    desk.clock.advance_ns(1)

    with pytest.raises(PeerLost, match="did not drain"):
        desk.session.check_drained()


async def test_a_transfer_that_drained_is_no_reason_to_end_the_session(desk: SessionDesk) -> None:
    """However long ago it failed."""
    transfer = await requested(desk)
    transfer.prefill.abort(CAUSE)
    desk.cancelled(transfer)
    desk.clock.advance_s(100 * DRAIN_LIMIT_S)

    desk.session.check_drained()


async def test_a_session_without_transfers_is_unmapped_when_closed(desk: SessionDesk) -> None:
    """And its writer ends."""
    desk.session.close(LOST)

    assert desk.session.is_unmapped
    assert await desk.said() == [None]


async def test_messages_after_the_end_are_counted(desk: SessionDesk) -> None:
    """What was on its way does no harm."""
    transfer = await streaming(desk)
    desk.session.close(LOST)

    desk.cancelled(transfer)

    assert desk.session.statistics().unknown_messages == 1
    errors: list[KVSpanError] = desk.closed
    assert errors == [LOST]
