"""How transfers and sessions of the decode service end: what comes back, when, and once."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import (
    Cancelled,
    ChecksumMismatch,
    KVSpanError,
    PeerLost,
)
from common.session.decode_side import SessionState
from common.session.messages import GoAway, PrefillFailed
from decode_service.prefill.session_transfers import DRAIN_LIMIT_S
from tests.support.decode_sessions import (
    Making,
    SessionDesk,
    Transfer,
    complete,
    ending,
    leave,
    make_session_desk,
    requested,
    streaming,
)

pytestmark = pytest.mark.usefixtures("leak_check")

CAUSE = Cancelled("by the client")
LOST = PeerLost("the stream broke")


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


@pytest.mark.parametrize("making", [ending, complete])
async def test_what_has_its_end_is_published_when_the_peer_is_lost(desk: SessionDesk, making: Making) -> None:
    """It needs the slab only, which stays mapped until the publication and no longer."""
    transfer = await making(desk)

    desk.session.close(LOST)
    assert desk.num_mappings == 1
    desk.importer.finish()
    await transfer.prefill.wait()
    transfer.prefill.prove_complete()
    transfer.prefill.settle()

    assert (desk.session.slots.is_unmapped, desk.num_slots) == (True, 0)
    assert not transfer.is_free
    leave(transfer)
    assert transfer.is_free


@pytest.mark.parametrize("making", [requested, streaming])
async def test_a_lost_producer_fails_what_it_has_not_ended(desk: SessionDesk, making: Making) -> None:
    """Pages come back with the last copy, and the slab is unmapped not earlier and not later."""
    transfer = await making(desk)
    leave(transfer)
    is_copying = bool(desk.importer.jobs)

    desk.session.close(LOST)

    assert (transfer.is_free, desk.session.slots.is_unmapped) == (not is_copying, not is_copying)
    assert desk.num_mappings == int(is_copying)
    desk.importer.finish()
    assert (transfer.is_free, desk.session.slots.is_unmapped, desk.num_mappings) == (True, True, 0)


@pytest.mark.parametrize("making", [requested, streaming])
async def test_the_call_that_waits_hears_of_the_loss(desk: SessionDesk, making: Making) -> None:
    """No wait without an end."""
    transfer = await making(desk)
    waiting = asyncio.create_task(transfer.prefill.wait())

    desk.session.close(LOST)

    with pytest.raises(PeerLost):
        await waiting


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


@pytest.mark.parametrize("making", [requested, streaming])
async def test_a_transfer_that_never_drains_ends_a_session_of_its_own(
    desk: SessionDesk, making: Making
) -> None:
    """The limit counts from the failure and is not moved by asking or by another cancel."""
    transfer = await making(desk)
    desk.clock.advance_s(100 * DRAIN_LIMIT_S)
    desk.session.check_drained()
    transfer.prefill.abort(CAUSE)

    for _ in range(10):
        desk.clock.advance_s(DRAIN_LIMIT_S / 10)
        transfer.prefill.abort(CAUSE)
        desk.session.check_drained()
    assert not desk.session.is_leaving
    desk.clock.advance_ns(1)

    with pytest.raises(PeerLost, match="did not drain"):
        desk.session.check_drained()
    assert desk.session.is_leaving


@pytest.mark.parametrize(("longest_step_ms", "limit_s"), [(30_000, 40), (2**32 - 1, 610)])
async def test_an_engine_that_cannot_be_stopped_has_that_much_more_time(
    slab_dir: Path, longest_step_ms: int, limit_s: int
) -> None:
    """The limit follows what the engine says of itself, up to ten minutes."""
    with make_session_desk(slab_dir) as desk:
        await desk.open(longest_step_ms)
        transfer = await requested(desk)
        transfer.prefill.abort(CAUSE)
        desk.clock.advance_s(limit_s)
        desk.session.check_drained()
        desk.clock.advance_ns(1)

        with pytest.raises(PeerLost):
            desk.session.check_drained()
        leave(transfer)
        desk.session.close(LOST)


async def test_a_drain_within_what_the_engine_says_disturbs_nobody(slab_dir: Path) -> None:
    """Rule 8: while the engine is in a step of half a minute, its session goes on and takes more."""
    with make_session_desk(slab_dir) as desk:
        await desk.open(longest_step_ms=30_000)
        slow, neighbour = await requested(desk), await ending(desk)
        slow.prefill.abort(CAUSE)
        for _ in range(40):
            desk.clock.advance_s(1)
            desk.session.check_drained()

        assert (desk.session.is_retired, desk.session.is_leaving) == (False, False)
        desk.importer.finish()
        await neighbour.prefill.wait()
        neighbour.prefill.prove_complete()
        neighbour.prefill.settle()
        await desk.said(6)  # five credits and a cancel: what follows is the next start
        third = await requested(desk)
        desk.cancelled(slow)
        desk.session.check_drained()
        assert (desk.session.is_open, desk.session.is_leaving) == (True, False)
        for one in (slow, neighbour, third):
            leave(one)
        desk.session.close(LOST)


async def overdue_beside(desk: SessionDesk) -> tuple[Transfer, Transfer]:
    """Return a transfer that has not drained in time, and a neighbour that is ending."""
    overdue, neighbour = await requested(desk), await ending(desk)
    overdue.prefill.abort(CAUSE)
    desk.clock.advance_s(DRAIN_LIMIT_S + 1)
    desk.session.check_drained()
    leave(overdue)
    return overdue, neighbour


async def test_a_transfer_that_never_drains_leaves_its_neighbours_undisturbed(desk: SessionDesk) -> None:
    """Rule 8: the session takes no more, and ends when nothing is left but what does not drain."""
    overdue, neighbour = await overdue_beside(desk)

    assert (desk.session.is_open, desk.session.is_retired) == (True, True)
    assert desk.session.is_leaving
    desk.importer.finish()
    await neighbour.prefill.wait()
    neighbour.prefill.prove_complete()
    desk.session.check_drained()
    neighbour.prefill.settle()

    with pytest.raises(PeerLost, match="the others have ended"):
        desk.session.check_drained()
    assert (overdue.is_free, desk.num_slots) == (False, 1)
    leave(neighbour)


async def test_a_transfer_that_drains_after_all_ends_its_session_no_earlier(desk: SessionDesk) -> None:
    """Another session stands beside it by then; it still waits for the neighbours, and for nobody else."""
    overdue, neighbour = await overdue_beside(desk)

    desk.cancelled(overdue)
    assert (overdue.is_free, desk.num_slots) == (True, 1)
    desk.session.check_drained()
    neighbour.prefill.abort(CAUSE)
    leave(neighbour)
    desk.importer.finish()

    with pytest.raises(PeerLost):
        desk.session.check_drained()
    assert desk.num_slots == 0


async def test_neighbours_may_not_drain_either(desk: SessionDesk) -> None:
    """Each has the whole limit, and the session ends with the last."""
    first, second = await requested(desk), await streaming(desk)
    first.prefill.abort(CAUSE)
    desk.clock.advance_s(DRAIN_LIMIT_S / 2)
    second.prefill.abort(CAUSE)
    desk.clock.advance_s(DRAIN_LIMIT_S / 2 + 1)
    desk.session.check_drained()
    desk.clock.advance_s(DRAIN_LIMIT_S)

    with pytest.raises(PeerLost):
        desk.session.check_drained()
    for transfer in (first, second):
        leave(transfer)


async def test_a_transfer_that_drained_is_no_reason_to_end_the_session(desk: SessionDesk) -> None:
    """However long ago it failed."""
    transfer = await requested(desk)
    transfer.prefill.abort(CAUSE)
    desk.cancelled(transfer)
    desk.clock.advance_s(100 * DRAIN_LIMIT_S)

    desk.session.check_drained()


@pytest.mark.parametrize(
    ("error", "level", "event"),
    [(LOST, "WARNING", "transfer.failed"), (CAUSE, "INFO", "transfer.cancelled")],
)
async def test_every_line_about_a_transfer_names_its_request(
    desk: SessionDesk, caplog: pytest.LogCaptureFixture, error: KVSpanError, level: str, event: str
) -> None:
    """Ids of transfers are unique in their session only; a client that leaves is no failure."""
    caplog.set_level(logging.INFO)
    transfer = await streaming(desk)

    transfer.prefill.abort(error)
    leave(transfer)
    desk.importer.finish()
    desk.cancelled(transfer)

    names = {"request_id": "000001", "transfer_id": 1, "slab": desk.slab.name}
    assert [(record.levelname, record.msg) for record in caplog.records] == [
        ("INFO", "transfer.started"),
        (level, event),
        ("INFO", "transfer.drained"),
    ]
    assert all(names.items() <= vars(record)["fields"].items() for record in caplog.records)
    assert vars(caplog.records[2])["fields"]["outcome"] == error.code


async def test_a_session_without_transfers_is_unmapped_when_closed(desk: SessionDesk) -> None:
    """And its writer ends."""
    desk.session.close(LOST)

    assert desk.session.slots.is_unmapped
    assert await desk.said() == [None]


async def test_the_end_of_a_session_is_told(desk: SessionDesk) -> None:
    """Whoever waits for a place must look at the others."""
    changes = desk.num_changes

    desk.session.close(LOST)

    assert desk.num_changes == changes + 1
    assert not desk.session.is_open


async def test_a_peer_that_drains_gets_no_new_transfer(desk: SessionDesk) -> None:
    """Whoever chooses a place is told at once; what runs goes on, and so does the session."""
    running, refused = await streaming(desk), await requested(desk)
    changes = desk.num_changes

    desk.session.receive(PrefillFailed(refused.start.transfer_id, 1, "SHUTTING_DOWN", "shutting down"))
    leave(refused)

    assert (refused.is_free, desk.num_slots) == (True, 1)
    assert (desk.session.is_open, desk.session.is_leaving) == (True, True)
    assert desk.num_changes > changes
    desk.importer.finish()
    desk.session.check_drained()
    running.prefill.abort(CAUSE)
    desk.cancelled(running)
    leave(running)


async def test_a_peer_that_shuts_down_without_a_go_away_gets_the_last_word(
    desk: SessionDesk,
) -> None:
    """It says so of a prompt alone: else the session would stay, take nothing and never end."""
    refused = await requested(desk)

    desk.session.receive(PrefillFailed(refused.start.transfer_id, 1, "SHUTTING_DOWN", "shutting down"))

    assert await desk.said() == [None]
    assert desk.session.statistics().state is SessionState.LEFT
    leave(refused)
    assert refused.is_free


async def test_a_peer_that_drains_gets_no_more_prompts_and_the_last_word(desk: SessionDesk) -> None:
    """Whoever chooses a place is told at once; the running prompt goes on, and then the stream may end."""
    transfer, changes = await streaming(desk), desk.num_changes

    desk.session.receive(GoAway("tired"))

    assert (desk.session.is_open, desk.session.is_leaving) == (True, True)
    assert desk.num_changes == changes + 1
    desk.cancelled(transfer)
    assert await desk.said() == [None]
    desk.importer.finish()
    leave(transfer)
    assert transfer.is_free


async def test_a_copy_that_ends_after_the_loss_leaves_no_mark(desk: SessionDesk) -> None:
    """The request may run again by then, and its times are those of the try that succeeds."""
    transfer = await streaming(desk)
    desk.importer.finish(1)
    desk.session.close(LOST)

    desk.importer.finish()

    assert len(transfer.timeline.spans) == 1
    leave(transfer)
