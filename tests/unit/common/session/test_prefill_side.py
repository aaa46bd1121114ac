"""The prefill service's half of a session: jobs, their one terminal message, and when the slab is idle."""

from collections.abc import Callable

import pytest

from common.errors import (
    EngineFailed,
    GeometryMismatch,
    LocalProtocolError,
    RemoteProtocolError,
)
from common.kv.ranges import Range
from common.session.actions import AttachSlab, Enqueue, ReturnCredit, Send
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    ReleaseSpan,
    SpanSealed,
)
from common.session.prefill_side import PrefillSession
from common.session.prefill_states import PREFILL_SESSION_TRANSITIONS, PrefillEvent, PrefillState
from tests.support.factories import make_geometry
from tests.support.sessions import (
    NONCE,
    OTHER,
    SPANS,
    START,
    TIMINGS,
    finish_job,
    make_hello,
    make_identity,
    make_logits,
    make_offer,
    make_open_prefill_session,
    make_queued_job,
    make_running_job,
    make_stopping_job,
    make_totals,
    make_welcome,
    renamed,
    sent,
)

TOTALS = make_totals(SPANS)
CANCEL = CancelPrefill(21, 1, "REQUEST_CANCELLED")
FAILURE = EngineFailed("a device was lost")


def make_session() -> PrefillSession:
    """Return a session that waits for Hello."""
    return PrefillSession(make_offer())


def make_attaching() -> PrefillSession:
    """Return a session whose slab is being mapped."""
    session = make_session()
    session.receive(make_hello())
    return session


def make_draining() -> PrefillSession:
    """Return a session that said GoAway."""
    session = make_open_prefill_session()
    session.leave()
    return session


def make_closed() -> PrefillSession:
    """Return a session that ended without jobs."""
    session = make_open_prefill_session()
    session.close()
    return session


IN_STATE: dict[PrefillState, Callable[[], PrefillSession]] = {
    PrefillState.WAITING: make_session,
    PrefillState.ATTACHING: make_attaching,
    PrefillState.OPEN: make_open_prefill_session,
    PrefillState.LEAVING: make_draining,
    PrefillState.CLOSED: make_closed,
}


def test_the_table_is_the_diagram() -> None:
    """Forward only, and closed from everywhere."""
    closing = {
        (state, PrefillEvent.CLOSE): PrefillState.CLOSED
        for state in PrefillState
        if state is not PrefillState.CLOSED
    }

    assert (
        closing
        | {
            (PrefillState.WAITING, PrefillEvent.HELLO): PrefillState.ATTACHING,
            (PrefillState.ATTACHING, PrefillEvent.ATTACHED): PrefillState.OPEN,
            (PrefillState.OPEN, PrefillEvent.LEAVE): PrefillState.LEAVING,
        }
        == PREFILL_SESSION_TRANSITIONS
    )


def test_every_state_has_a_walk_and_closed_has_no_exit() -> None:
    """Reachable by the public calls alone."""
    assert {state: make().state for state, make in IN_STATE.items()} == {
        state: state for state in PrefillState
    }
    assert not any(before is PrefillState.CLOSED for before, _ in PREFILL_SESSION_TRANSITIONS)


@pytest.mark.parametrize("state", [state for state in PrefillState if state is not PrefillState.OPEN])
def test_a_drain_outside_an_open_session_says_and_moves_nothing(state: PrefillState) -> None:
    """A service drains all its sessions: those without a peer to tell, and those it told before."""
    session = IN_STATE[state]()
    before = session.statistics()

    assert session.leave() == ()
    assert session.statistics() == before


@pytest.mark.parametrize("state", [state for state in PrefillState if state is not PrefillState.ATTACHING])
def test_an_attachment_nobody_asked_for_raises_and_changes_nothing(state: PrefillState) -> None:
    """Welcome answers exactly one Hello; a session that closed meanwhile stays closed."""
    session = IN_STATE[state]()
    before = session.statistics()

    with pytest.raises(LocalProtocolError):
        session.attached(NONCE)

    assert session.statistics() == before


@pytest.mark.parametrize("state", [PrefillState.ATTACHING, PrefillState.OPEN, PrefillState.LEAVING])
def test_a_second_hello_raises_and_changes_nothing(state: PrefillState) -> None:
    """One Hello per session."""
    session = IN_STATE[state]()
    before = session.statistics()

    with pytest.raises(RemoteProtocolError):
        session.receive(make_hello())

    assert session.statistics() == before


@pytest.mark.parametrize("message", [START, CANCEL, ReleaseSpan(21, 1, 0)])
@pytest.mark.parametrize("state", [PrefillState.WAITING, PrefillState.ATTACHING])
def test_a_message_before_the_welcome_raises_and_changes_nothing(
    state: PrefillState, message: DecodeMessage
) -> None:
    """Hello comes first, and the slab is mapped before anything is asked for."""
    session = IN_STATE[state]()
    before = session.statistics()

    with pytest.raises(RemoteProtocolError):
        session.receive(message)

    assert session.statistics() == before


@pytest.mark.parametrize("message", [make_hello(), START, CANCEL, ReleaseSpan(21, 1, 0)])
def test_a_message_after_the_end_is_counted_and_ignored(message: DecodeMessage) -> None:
    """What was under way when the stream broke starts nothing."""
    session = make_closed()

    assert session.receive(message) == ()
    assert session.statistics().ignored.unknown_messages == 1


def test_a_session_greets_attaches_and_welcomes() -> None:
    """The Welcome carries what was agreed and the nonce that was read."""
    session = make_session()

    assert session.receive(make_hello()) == (AttachSlab(make_hello().slab),)
    assert session.attached(NONCE) == (Send(make_welcome()),)
    assert session.agreement.version == 3


def test_a_hello_that_does_not_fit_changes_nothing() -> None:
    """The refusal is raised before anything is mapped."""
    session = make_session()
    misfit = make_hello(make_identity(make_geometry(head_dim=16)))

    with pytest.raises(GeometryMismatch):
        session.receive(misfit)

    assert session.state is PrefillState.WAITING


def test_a_job_walks_from_start_to_done() -> None:
    """Accepted and queued, sealed span by span, ended once."""
    session = make_open_prefill_session()

    assert session.receive(START) == (Send(PrefillAccepted(21, 1, 0)), Enqueue(START))
    assert session.engine_started(21)
    assert session.span_written(SPANS[0]) == (Send(SpanSealed(SPANS[0])),)
    assert finish_job(session) == (Send(PrefillDone(21, 1, 3, TOTALS, make_logits(), TIMINGS)),)
    assert session.statistics().num_jobs == 0
    assert session.statistics().pinned_bytes == 0


def test_a_job_that_fails_says_why() -> None:
    """The reason is the code of the error."""
    session = make_running_job()

    actions = session.engine_failed(21, FAILURE)

    assert actions == (Send(PrefillFailed(21, 1, "ENGINE_FAILED", str(FAILURE))),)


def test_the_queue_position_counts_the_jobs_before() -> None:
    """Two jobs live, so the third waits for two."""
    session = make_queued_job()
    session.receive(OTHER)
    third = renamed(START, 23, Range(24_576, 28_672))

    assert sent(session.receive(third)) == [PrefillAccepted(23, 1, 2)]
    assert session.statistics().pinned_bytes == 8192 + 4096 + 4096


def test_the_release_of_a_told_span_is_credit_once() -> None:
    """Decode has copied it; saying so again gives nothing."""
    session = make_running_job()
    session.span_written(SPANS[0])
    session.span_written(SPANS[1])

    assert session.receive(ReleaseSpan(21, 1, 1)) == (ReturnCredit(21, 1),)
    assert session.receive(ReleaseSpan(21, 1, 1)) == ()

    assert session.statistics().ignored.ignored_releases == 1


@pytest.mark.parametrize("make_job", [make_queued_job, make_running_job, make_stopping_job])
def test_a_span_that_was_not_told_gives_no_credit(make_job: Callable[[], PrefillSession]) -> None:
    """Else its bytes would be written twice before decode has read them."""
    session = make_job()

    assert session.receive(ReleaseSpan(21, 1, 0)) == ()

    assert session.statistics().ignored.ignored_releases == 1


@pytest.mark.parametrize("release", [ReleaseSpan(21, 2, 0), ReleaseSpan(22, 1, 0)])
def test_credit_of_another_attempt_or_of_no_job_is_unknown(release: ReleaseSpan) -> None:
    """It is late; the live job keeps what it holds."""
    session = make_running_job()
    session.span_written(SPANS[0])

    assert session.receive(release) == ()

    assert session.statistics().ignored.unknown_messages == 1
