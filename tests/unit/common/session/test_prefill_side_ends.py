"""How jobs of a prefill session are stopped, and when its slab is idle."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import (
    EngineFailed,
    InvariantViolation,
    LeaseExpired,
)
from common.session.actions import Dequeue, Enqueue, ReturnCredit, Send, SlabIdle, StopEngine
from common.session.messages import (
    CancelPrefill,
    GoAway,
    Ping,
    Pong,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ReleaseSpan,
    SpanSealed,
    StartPrefill,
    Welcome,
)
from common.session.prefill_job import PrefillJob
from common.session.prefill_side import PrefillSession
from common.session.prefill_states import PrefillState
from tests.support.sessions import (
    NONCE,
    OTHER,
    SPANS,
    START,
    finish_job,
    make_hello,
    make_offer,
    make_queued_job,
    make_running_job,
    make_stopping_job,
)

CANCEL = CancelPrefill(21, 1, "REQUEST_CANCELLED")
FAILURE = EngineFailed("a device was lost")
EXPIRED = LeaseExpired("not done within 30 s")
IDLE = SlabIdle()


def test_a_queued_job_is_cancelled_at_once() -> None:
    """A8, A10: out of the queue before the answer, and the engine that comes for it is turned away."""
    session = make_queued_job()

    assert session.receive(CANCEL) == (Dequeue(21), Send(PrefillCancelled(21, 1)))
    assert not session.engine_started(21)
    assert session.statistics().num_jobs == 0


def test_a_running_job_is_cancelled_when_the_engine_has_ended() -> None:
    """Rule 4: the answer is the proof that no byte is written any more."""
    session = make_running_job()

    assert session.receive(CANCEL) == (StopEngine(21),)
    assert session.statistics().pinned_bytes == 8192
    assert session.engine_failed(21, FAILURE) == (Send(PrefillCancelled(21, 1)),)
    assert session.statistics().pinned_bytes == 0


def test_an_engine_that_finished_in_spite_of_a_cancel_is_still_cancelled() -> None:
    """Exactly one terminal message, and it is the one that was asked for."""
    assert finish_job(make_stopping_job()) == (Send(PrefillCancelled(21, 1)),)


def test_a_repeated_cancel_stops_the_engine_again_and_answers_once() -> None:
    """Cancels may cross with anything."""
    session = make_stopping_job()

    assert session.receive(CANCEL) == (StopEngine(21),)
    assert finish_job(session) == (Send(PrefillCancelled(21, 1)),)
    assert session.receive(CANCEL) == ()
    assert session.statistics().ignored.unknown_messages == 1


@pytest.mark.parametrize("cancel", [replace(CANCEL, attempt=2), replace(CANCEL, transfer_id=22)])
def test_a_cancel_of_no_live_job_is_counted_and_ignored(cancel: CancelPrefill) -> None:
    """A3: matched by transfer id and attempt."""
    session = make_running_job()

    assert session.receive(cancel) == ()
    assert session.statistics().ignored.unknown_messages == 1
    assert session.span_written(SPANS[0]) == (Send(SpanSealed(SPANS[0])),)


@pytest.mark.parametrize("has_ended", [False, True])
def test_spans_of_a_cancelled_job_are_dropped(has_ended: bool) -> None:
    """What was written after the cancel is never told, nor after the terminal message."""
    session = make_stopping_job()
    if has_ended:
        finish_job(session)

    assert session.span_written(SPANS[0]) == ()
    assert session.statistics().ignored.dropped_spans == 1


def test_a_queued_job_that_expires_fails_at_once() -> None:
    """A4, T1: out of the queue, with the reason."""
    session = make_queued_job()

    actions = session.expire(21, EXPIRED)

    assert actions == (Dequeue(21), Send(PrefillFailed(21, 1, "LEASE_EXPIRED", str(EXPIRED))))
    assert session.statistics().num_jobs == 0


def test_a_running_job_that_expires_fails_when_the_engine_has_ended() -> None:
    """Rule 4: a timeout is not proof that bytes stopped moving."""
    session = make_running_job()

    assert session.expire(21, EXPIRED) == (StopEngine(21),)
    assert session.span_written(SPANS[0]) == ()
    assert finish_job(session) == (Send(PrefillFailed(21, 1, "LEASE_EXPIRED", str(EXPIRED))),)


def test_an_expiry_of_a_job_that_ended_does_nothing() -> None:
    """A6: expiry and the end may cross."""
    session = make_running_job()
    finish_job(session)

    assert session.expire(21, EXPIRED) == ()


def test_an_expiry_frees_only_its_own_job() -> None:
    """A4: the neighbour lives on."""
    session = make_running_job()
    session.receive(OTHER)

    session.expire(22, EXPIRED)

    assert session.span_written(SPANS[0]) == (Send(SpanSealed(SPANS[0])),)
    assert session.statistics().num_jobs == 1


def test_an_expiry_after_close_changes_nothing() -> None:
    """The engine was told to stop already, and nobody hears a verdict."""
    session = make_running_job()
    session.close()

    assert session.expire(21, EXPIRED) == ()
    assert finish_job(session) == (IDLE,)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_session_without_jobs_is_idle_when_closed(num_steps: int) -> None:
    """Waiting to draining: the slab can be unmapped at once; a second close says nothing more."""
    session = PrefillSession(make_offer())
    steps: list[Callable[[], object]] = [
        lambda: session.receive(make_hello()),
        lambda: session.attached(NONCE),
        session.leave,
    ]
    for step in steps[:num_steps]:
        step()

    assert session.close() == (IDLE,)
    assert session.close() == ()


def test_a_queued_job_vanishes_when_the_session_closes() -> None:
    """Nobody is there to be answered."""
    session = make_queued_job()

    assert session.close() == (Dequeue(21), IDLE)
    assert not session.engine_started(21)


@pytest.mark.parametrize("make", [make_running_job, make_stopping_job])
def test_the_slab_is_idle_after_the_engine_has_ended(make: Callable[[], PrefillSession]) -> None:
    """Unmapping under a writer would be a bus error."""
    session = make()

    assert session.close() == (StopEngine(21),)
    assert session.span_written(SPANS[0]) == ()
    session.check_integrity()
    assert finish_job(session) == (IDLE,)
    assert session.statistics().num_jobs == 0


def test_a_closed_session_stops_running_jobs_and_drops_queued_ones() -> None:
    """Idle exactly once, with the end of the last job."""
    session = make_running_job()
    session.receive(OTHER)

    assert session.close() == (StopEngine(21), Dequeue(22))
    assert session.engine_failed(21, FAILURE) == (IDLE,)
    assert session.close() == ()


def test_the_slab_is_idle_only_after_the_last_of_several_engines() -> None:
    """The rule does not lean on there being one engine thread."""
    session = make_running_job()
    session.receive(OTHER)
    session.engine_started(22)
    session.close()

    assert finish_job(session) == ()
    assert session.engine_failed(22, FAILURE) == (IDLE,)


def test_integrity_finds_a_running_job_in_a_closed_session() -> None:
    """The check itself can fail."""
    session = make_running_job()
    session._state = PrefillState.CLOSED

    with pytest.raises(InvariantViolation):
        session.check_integrity()


def test_integrity_finds_slots_that_overlap() -> None:
    """No two live jobs may write the same byte."""
    session = make_running_job()
    session.receive(OTHER)
    stolen: StartPrefill = replace(OTHER, slot_offset=START.slot_offset + 64)
    session._jobs[22] = PrefillJob(stolen)

    with pytest.raises(InvariantViolation):
        session.check_integrity()


def test_a_draining_session_refuses_new_jobs_and_ends_the_old() -> None:
    """Decode is told why, so that it can go elsewhere; a repeated start of a live job is no new job."""
    session = make_running_job()

    (away,) = session.leave()
    (refused,) = session.receive(replace(START, transfer_id=22, slot_offset=12_288))

    assert away == Send(GoAway("the prefill service is shutting down"))
    assert session.leave() == (), "said once"
    assert session.state is PrefillState.LEAVING
    assert isinstance(refused, Send)
    assert isinstance(refused.message, PrefillFailed)
    assert (refused.message.transfer_id, refused.message.reason) == (22, "SHUTTING_DOWN")
    assert session.receive(START) == ()
    (done,) = finish_job(session)
    assert isinstance(done, Send)
    assert isinstance(done.message, PrefillDone)


def test_a_session_that_was_opened_while_draining_starts_nothing() -> None:
    """A Hello may be under way when the drain begins."""
    session = PrefillSession(make_offer())
    assert session.leave() == (), "nobody is there to hear it"
    session.receive(make_hello())
    welcome, away = session.attached(NONCE)
    assert isinstance(welcome, Send)
    assert isinstance(welcome.message, Welcome)
    assert away == Send(GoAway("the prefill service is shutting down"))
    assert session.state is PrefillState.LEAVING

    actions = session.receive(START)

    assert not any(isinstance(action, Enqueue) for action in actions)


def test_a_draining_session_still_hears_what_concerns_its_jobs() -> None:
    """Releases, cancels and pings go on until the stream ends."""
    session = make_running_job()
    session.span_written(SPANS[0])
    session.leave()

    assert session.receive(ReleaseSpan(21, 1, 0)) == (ReturnCredit(21, 0),)
    assert session.receive(Ping(5)) == (Send(Pong(5)),)
    assert session.receive(CANCEL) == (StopEngine(21),)
