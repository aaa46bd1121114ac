"""What faults, cancels and the end of the stream cost a decode session, and when its slab is idle."""

from dataclasses import replace

import pytest

from common.errors import (
    Cancelled,
    InvariantViolation,
    PeerLost,
    StaleGeneration,
)
from common.session.actions import (
    Send,
    SlabIdle,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.decode_side import DecodeSession, SessionState
from common.session.messages import (
    PrefillAccepted,
    PrefillCancelled,
    PrefillFailed,
    PrefillMessage,
    SpanSealed,
)
from tests.support.sessions import (
    NONCE,
    OTHER,
    SPANS,
    START,
    begin,
    finish_imports,
    make_done,
    make_hello,
    make_open_decode_session,
    make_welcome,
    tell,
)

CAUSE = Cancelled("by the client")
LOST = PeerLost("stream broke")


ANY_TRANSFER_MESSAGE: list[PrefillMessage] = [
    PrefillAccepted(21, 1, 0),
    SpanSealed(SPANS[0]),
    make_done(START, SPANS),
    PrefillFailed(21, 1, "ENGINE_FAILED", "a device was lost"),
    PrefillCancelled(21, 1),
]


@pytest.mark.parametrize("message", ANY_TRANSFER_MESSAGE, ids=lambda message: type(message).__name__)
def test_a_message_about_an_unknown_transfer_is_counted_and_ignored(message: PrefillMessage) -> None:
    """A3: never an exception, never another transfer."""
    session = make_open_decode_session()
    begin(session, OTHER)

    assert session.receive(message) == ()
    assert session.statistics().unknown_messages == 1
    assert session.transfer(22).error is None


@pytest.mark.parametrize(
    "message",
    [
        PrefillAccepted(21, 1, 4),
        SpanSealed(replace(SPANS[1], generation=2)),
        SpanSealed(replace(SPANS[1], slot_id=8)),
        SpanSealed(replace(SPANS[1], offset=OTHER.slot_offset)),
        SpanSealed(replace(SPANS[1], attempt=2)),
        make_done(START, SPANS),
        replace(make_done(START, SPANS), attempt=2),
        PrefillAccepted(21, 2, 0),
        PrefillFailed(21, 2, "ENGINE_FAILED", "a device was lost"),
        PrefillCancelled(21, 2),
    ],
)
def test_a_wrong_message_fails_its_transfer_once_and_no_other(message: PrefillMessage) -> None:
    """Rules 3 and 8: the neighbour goes on to publication."""
    session = make_open_decode_session()
    begin(session)
    begin(session, OTHER)
    session.receive(SpanSealed(SPANS[0]))

    actions = session.receive(message)

    failures = [action for action in actions if isinstance(action, TransferFailed)]
    assert [failure.transfer_id for failure in failures] == [21]
    assert not any(isinstance(action, TransferDrained) for action in actions)
    tell(session, OTHER)
    assert finish_imports(session, OTHER) == (TransferComplete(22),)


@pytest.mark.parametrize(
    "message",
    [
        PrefillFailed(21, 2, "ENGINE_FAILED", "a device was lost"),
        PrefillCancelled(21, 2),
        replace(make_done(START, ()), attempt=2),
        replace(make_done(START, ()), generation=2),
    ],
)
def test_the_end_of_another_attempt_or_lease_does_not_drain(message: PrefillMessage) -> None:
    """Rule 4: only the producer of this attempt can say that it has drained."""
    session = make_open_decode_session()
    begin(session)

    actions = session.receive(message)

    assert [type(action) for action in actions] == [Send, TransferFailed]
    assert isinstance(actions[1], TransferFailed)
    assert isinstance(actions[1].error, StaleGeneration)
    assert session.receive(PrefillCancelled(21, 1)) == (TransferDrained(21),)


def test_late_events_of_ended_transfers_stay_counted() -> None:
    """Statistics of the session outlive its transfers."""
    session = make_open_decode_session()
    begin(session)
    session.receive(SpanSealed(SPANS[0]))
    session.receive(SpanSealed(SPANS[0]))
    session.abort(21, CAUSE)
    session.abort(21, CAUSE)
    session.receive(SpanSealed(SPANS[1]))
    session.import_finished(21, 0)
    session.receive(PrefillCancelled(21, 1))

    counts = session.statistics()

    assert (counts.num_transfers, counts.late_events, counts.duplicates) == (0, 2, 1)


def test_an_abort_of_what_has_drained_does_nothing() -> None:
    """A6: expiry and completion may cross."""
    session = make_open_decode_session()
    begin(session)
    session.receive(PrefillCancelled(21, 1))

    assert session.abort(21, CAUSE) == ()
    assert session.abort(99, CAUSE) == ()


def test_an_abort_after_completion_prevents_publication() -> None:
    """The client may go between the last copy and the next step."""
    session = make_open_decode_session()
    begin(session)
    tell(session)
    finish_imports(session)

    assert session.abort(21, CAUSE) == (TransferFailed(21, CAUSE), TransferDrained(21))
    with pytest.raises(KeyError):
        session.published(21)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_session_without_transfers_is_idle_when_closed(num_steps: int) -> None:
    """New, greeting or open: the slab can be unmapped at once, and a second close says nothing more."""
    session = DecodeSession(make_hello(), NONCE)
    if num_steps >= 1:
        session.greet()
    if num_steps == 2:
        session.receive(make_welcome())

    assert session.close(LOST) == (SlabIdle(),)
    assert session.close(LOST) == ()


def test_close_fails_every_live_transfer_once_and_waits_for_the_copies() -> None:
    """Rule 4: the slab is idle exactly once, with the end of the last copy out of it."""
    session = make_open_decode_session()
    begin(session)
    begin(session, OTHER)
    session.receive(SpanSealed(SPANS[0]))
    session.receive(SpanSealed(SPANS[1]))

    assert session.close(LOST) == (TransferFailed(21, LOST), TransferFailed(22, LOST), TransferDrained(22))
    assert session.import_finished(21, 1) == ()
    session.check_integrity()
    assert session.import_finished(21, 0) == (TransferDrained(21), SlabIdle())
    assert session.close(LOST) == ()


def test_close_does_not_fail_again_what_failed_before() -> None:
    """Rule 6: an aborting transfer keeps its error; the loss of the producer drains it."""
    session = make_open_decode_session()
    begin(session)
    session.abort(21, CAUSE)

    assert session.close(LOST) == (TransferDrained(21), SlabIdle())


def test_integrity_finds_a_live_transfer_in_a_closed_session() -> None:
    """The check itself can fail."""
    session = make_open_decode_session()
    begin(session)
    session._state = SessionState.CLOSED

    with pytest.raises(InvariantViolation):
        session.check_integrity()
