"""The decode service's half of a session: who may say what, and whom it concerns."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import (
    Cancelled,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    SlabNotShared,
)
from common.kv.coverage import Coverage, CoverageStatistics
from common.kv.ranges import Range
from common.session.actions import (
    HalfClose,
    ImportSpan,
    Send,
    SessionLeaving,
    SessionOpened,
    SlabIdle,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.decode_side import SESSION_TRANSITIONS, DecodeSession, SessionEvent, SessionState
from common.session.messages import (
    GoAway,
    PrefillAccepted,
    PrefillCancelled,
    PrefillFailed,
    PrefillMessage,
    ReleaseSpan,
    SpanSealed,
)
from tests.support.factories import make_geometry
from tests.support.sessions import (
    NONCE,
    OTHER,
    SPANS,
    START,
    begin,
    finish_imports,
    make_coverage,
    make_done,
    make_hello,
    make_open_decode_session,
    make_spans,
    make_welcome,
    tell,
)

CAUSE = Cancelled("by the client")
LOST = PeerLost("stream broke")
AWAY = GoAway("tired")


def make_session() -> DecodeSession:
    """Return a session that has not said Hello."""
    return DecodeSession(make_hello(), NONCE)


def make_greeting() -> DecodeSession:
    """Return a session that waits for Welcome."""
    session = make_session()
    session.greet()
    return session


def make_leaving() -> DecodeSession:
    """Return a session that was sent away while a transfer runs."""
    session = make_open_decode_session()
    begin(session)
    session.receive(AWAY)
    return session


def make_left() -> DecodeSession:
    """Return a session that has said its last word."""
    session = make_open_decode_session()
    session.receive(AWAY)
    return session


def make_closed() -> DecodeSession:
    """Return a session that was open and had no transfer."""
    session = make_open_decode_session()
    session.close(LOST)
    return session


IN_STATE: dict[SessionState, Callable[[], DecodeSession]] = {
    SessionState.NEW: make_session,
    SessionState.GREETING: make_greeting,
    SessionState.OPEN: make_open_decode_session,
    SessionState.LEAVING: make_leaving,
    SessionState.LEFT: make_left,
    SessionState.CLOSED: make_closed,
}
ANY_TRANSFER_MESSAGE: list[PrefillMessage] = [
    PrefillAccepted(21, 1, 0),
    SpanSealed(SPANS[0]),
    make_done(START, SPANS),
    PrefillFailed(21, 1, "ENGINE_FAILED", "a device was lost"),
    PrefillCancelled(21, 1),
    GoAway("early"),
]


def test_the_table_is_the_diagram() -> None:
    """Forward only, and closed from everywhere."""
    closing = {
        (state, SessionEvent.CLOSE): SessionState.CLOSED
        for state in SessionState
        if state is not SessionState.CLOSED
    }

    assert (
        closing
        | {
            (SessionState.NEW, SessionEvent.GREET): SessionState.GREETING,
            (SessionState.GREETING, SessionEvent.WELCOME): SessionState.OPEN,
            (SessionState.OPEN, SessionEvent.GO_AWAY): SessionState.LEAVING,
            (SessionState.LEAVING, SessionEvent.LAST_ENDED): SessionState.LEFT,
        }
        == SESSION_TRANSITIONS
    )


def test_every_state_has_a_walk_and_closed_has_no_exit() -> None:
    """Reachable by the public calls alone."""
    assert {state: make().state for state, make in IN_STATE.items()} == {
        state: state for state in SessionState
    }
    assert not any(before is SessionState.CLOSED for before, _ in SESSION_TRANSITIONS)


@pytest.mark.parametrize("state", [state for state in SessionState if state is not SessionState.NEW])
def test_greeting_twice_raises_and_changes_nothing(state: SessionState) -> None:
    """One Hello per session."""
    session = IN_STATE[state]()
    before = session.statistics()

    with pytest.raises(LocalProtocolError):
        session.greet()

    assert session.statistics() == before


@pytest.mark.parametrize("state", [state for state in SessionState if state is not SessionState.OPEN])
def test_a_transfer_cannot_begin_outside_an_open_session(state: SessionState) -> None:
    """Nothing may be sent before Welcome or after the end, and the id is not used up."""
    session = IN_STATE[state]()
    before = session.statistics()

    with pytest.raises(LocalProtocolError):
        session.begin(OTHER, make_coverage(OTHER))

    assert session.statistics() == before


@pytest.mark.parametrize(
    "state", [SessionState.NEW, SessionState.OPEN, SessionState.LEAVING, SessionState.LEFT]
)
def test_a_welcome_nobody_waits_for_raises_and_changes_nothing(state: SessionState) -> None:
    """Neither before Hello nor a second time."""
    session = IN_STATE[state]()
    before = session.statistics()

    with pytest.raises(RemoteProtocolError):
        session.receive(make_welcome())

    assert session.statistics() == before


@pytest.mark.parametrize("message", ANY_TRANSFER_MESSAGE, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("state", [SessionState.NEW, SessionState.GREETING])
def test_a_message_before_welcome_raises_and_changes_nothing(
    state: SessionState, message: PrefillMessage
) -> None:
    """Welcome comes first."""
    session = IN_STATE[state]()
    before = session.statistics()

    with pytest.raises(RemoteProtocolError):
        session.receive(message)

    assert session.statistics() == before


@pytest.mark.parametrize("message", [make_welcome(), *ANY_TRANSFER_MESSAGE])
def test_a_message_after_the_end_is_counted_and_ignored(message: PrefillMessage) -> None:
    """What was under way when the stream broke harms nobody."""
    session = make_closed()

    assert session.receive(message) == ()
    assert session.statistics().unknown_messages == 1


def test_a_session_opens_when_the_welcome_fits() -> None:
    """Hello, Welcome, open."""
    session = make_session()

    assert session.greet() == (Send(make_hello()),)
    assert session.welcome is None
    assert session.receive(make_welcome()) == (SessionOpened(),)
    assert session.welcome == make_welcome()


def test_a_wrong_nonce_keeps_the_session_shut() -> None:
    """The peer maps another memory; the session stays where it was, to be closed."""
    session = make_greeting()

    with pytest.raises(SlabNotShared):
        session.receive(replace(make_welcome(), nonce=bytes(32)))

    assert session.state is SessionState.GREETING
    assert session.close(LOST) == (SlabIdle(),)


def test_a_transfer_walks_through_a_session() -> None:
    """Started, imported, complete, published, forgotten."""
    session = make_open_decode_session()

    assert session.begin(START, make_coverage(START)) == (Send(START),)
    session.receive(PrefillAccepted(21, 1, 0))
    assert session.receive(SpanSealed(SPANS[0])) == (ImportSpan(SPANS[0]),)
    tell(session)
    assert finish_imports(session) == (TransferComplete(21),)
    assert session.published(21) == (TransferDrained(21),)
    assert session.num_transfers == session.statistics().num_transfers == 0
    session.check_integrity()


def test_two_transfers_that_interleave_do_not_mix() -> None:
    """W13: each message moves the transfer it names and no other."""
    session = make_open_decode_session()
    begin(session)
    begin(session, OTHER)
    for ours, theirs in zip(SPANS, make_spans(OTHER), strict=True):
        assert session.receive(SpanSealed(theirs)) == (ImportSpan(theirs),)
        assert session.receive(SpanSealed(ours)) == (ImportSpan(ours),)

    session.receive(make_done(OTHER, make_spans(OTHER)))

    assert finish_imports(session, OTHER) == (TransferComplete(22),)
    assert session.transfer(21).statistics().spans_in_flight == len(SPANS)


class UncountedCoverage(Coverage):
    """A coverage whose spans nobody may walk."""

    def statistics(self) -> CoverageStatistics:
        """Fail."""
        raise AssertionError("the spans were walked")


def test_the_number_of_transfers_is_known_without_a_walk_over_their_spans() -> None:
    """It is asked for with every request, however many spans are placed."""
    session = make_open_decode_session()
    numbers = [session.num_transfers]
    for start in (START, OTHER):
        required = make_geometry().required(0, len(start.token_ids))
        slot_bytes = Range(start.slot_offset, start.slot_offset + start.slot_size)
        session.begin(start, UncountedCoverage(make_geometry().groups, required, slot_bytes))
        numbers.append(session.num_transfers)

    assert numbers == [0, 1, 2]


def test_a_session_without_transfers_leaves_at_once() -> None:
    """GoAway, last word; later ones only count."""
    session = make_open_decode_session()

    leaving, last = session.receive(AWAY)

    assert isinstance(leaving, SessionLeaving)
    assert "tired" in str(leaving.error)
    assert last == HalfClose()
    assert session.receive(AWAY) == ()
    assert session.statistics().unknown_messages == 1
    assert session.ping() == ()


def test_the_last_word_waits_for_every_terminal_message() -> None:
    """A release is said in between; what is imported after the last word needs no word."""
    session = make_open_decode_session()
    begin(session)
    begin(session, OTHER)
    (_,) = session.receive(AWAY)
    assert len(session.ping()) == 1

    assert session.receive(PrefillCancelled(22, 1))[-1] == TransferDrained(22)
    session.receive(SpanSealed(SPANS[0]))
    assert session.import_finished(21, 0) == (Send(ReleaseSpan(21, 1, 0)),)
    for span in SPANS[1:]:
        session.receive(SpanSealed(span))
    assert session.receive(make_done(START, SPANS)) == (HalfClose(),)

    assert session.state is SessionState.LEFT
    for span in SPANS[1:-1]:
        assert session.import_finished(21, span.sequence) == ()
    assert session.import_finished(21, SPANS[-1].sequence) == (TransferComplete(21),)
    assert session.published(21) == (TransferDrained(21),)


def test_a_transfer_given_up_while_leaving_still_drains_first() -> None:
    """Rule 4: the cancel is said, and the last word waits for its answer."""
    session = make_leaving()

    cancel, failed = session.abort(21, CAUSE)

    assert isinstance(cancel, Send)
    assert failed == TransferFailed(21, CAUSE)
    assert session.receive(PrefillCancelled(21, 1)) == (TransferDrained(21), HalfClose())


def test_a_peer_that_is_lost_while_leaving_is_a_lost_peer() -> None:
    """What runs fails, and nothing more is said."""
    session = make_leaving()

    assert session.close(LOST) == (TransferFailed(21, LOST), TransferDrained(21), SlabIdle())


def test_the_name_of_the_request_is_never_a_key() -> None:
    """I1, I2: two transfers of one client name live side by side under their own ids."""
    session = make_open_decode_session()
    begin(session, replace(START, request_id="same"))
    begin(session, replace(OTHER, request_id="same"))

    session.receive(PrefillCancelled(22, 1))

    assert session.statistics().num_transfers == 1
    assert session.transfer(21).error is None


@pytest.mark.parametrize("transfer_id", [21, 20, 0])
def test_an_id_is_used_once(transfer_id: int) -> None:
    """I4: while it lives, after it ended, or never begun but passed: the second is refused."""
    session = make_open_decode_session()
    begin(session)
    session.receive(SpanSealed(SPANS[0]))
    before = session.statistics()

    with pytest.raises(LocalProtocolError):
        session.begin(replace(OTHER, transfer_id=transfer_id), make_coverage(OTHER))

    assert session.statistics() == before
    assert session.transfer(21).statistics().spans_in_flight == 1


def test_an_id_is_not_used_again_after_its_transfer_ended() -> None:
    """I4, serial: a late message about the first could be taken for the second."""
    session = make_open_decode_session()
    begin(session)
    session.receive(PrefillCancelled(21, 1))

    with pytest.raises(LocalProtocolError):
        session.begin(START, make_coverage(START))


def test_equal_ids_in_two_sessions_are_two_transfers() -> None:
    """I6: an id names a transfer inside its session only."""
    ours, theirs = make_open_decode_session(), make_open_decode_session()
    begin(ours)
    begin(theirs)

    theirs.receive(PrefillFailed(21, 1, "ENGINE_FAILED", "a device was lost"))

    assert ours.transfer(21).error is None
    assert theirs.statistics().num_transfers == 0
