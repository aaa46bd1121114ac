"""The prefill service's half of a session: jobs, their one terminal message, and when the slab is idle."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import (
    EngineFailed,
    GeometryMismatch,
    LocalProtocolError,
    RemoteProtocolError,
)
from common.kv.ranges import Range
from common.session.actions import AttachSlab, Enqueue, ReturnCredit, Send, SlabIdle
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    ReleaseSpan,
    SpanTold,
    TransferMode,
)
from common.session.prefill_side import JOB_TRANSITIONS, JobEvent, JobState, PrefillSession, PrefillState
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
IDLE = SlabIdle()


def make_session() -> PrefillSession:
    """Return a session that waits for Hello."""
    return PrefillSession(make_offer())


def make_attaching() -> PrefillSession:
    """Return a session whose slab is being mapped."""
    session = make_session()
    session.receive(make_hello())
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
    PrefillState.CLOSED: make_closed,
}


WITH_JOB: dict[JobState, Callable[[], PrefillSession]] = {
    JobState.QUEUED: make_queued_job,
    JobState.RUNNING: make_running_job,
    JobState.STOPPING: make_stopping_job,
}
JOB_EVENTS: dict[JobEvent, Callable[[PrefillSession], object]] = {
    JobEvent.ENGINE_STARTED: lambda session: session.engine_started(21),
    JobEvent.ENGINE_ENDED: finish_job,
    JobEvent.STOP: lambda session: session.receive(CANCEL),
}
ILLEGAL_JOB_EVENTS = [
    (state, event) for state in WITH_JOB for event in JobEvent if (state, event) not in JOB_TRANSITIONS
]


# ---------------------------------------------------------------------- the table


def test_the_table_is_the_diagram() -> None:
    """Every arrow is listed, a repeated stop included, and nothing else."""
    arrows = [
        (JobState.QUEUED, JobEvent.ENGINE_STARTED, JobState.RUNNING),
        (JobState.QUEUED, JobEvent.STOP, JobState.GONE),
        (JobState.RUNNING, JobEvent.STOP, JobState.STOPPING),
        (JobState.RUNNING, JobEvent.ENGINE_ENDED, JobState.GONE),
        (JobState.STOPPING, JobEvent.STOP, JobState.STOPPING),
        (JobState.STOPPING, JobEvent.ENGINE_ENDED, JobState.GONE),
    ]

    assert {(before, event): after for before, event, after in arrows} == JOB_TRANSITIONS


def test_every_state_can_be_reached_and_gone_has_no_exit() -> None:
    """A job ends once."""
    reached = {JobState.QUEUED}
    for _ in JobState:
        reached |= {after for (before, _), after in JOB_TRANSITIONS.items() if before in reached}

    assert reached == set(JobState)
    assert not any(before is JobState.GONE for before, _ in JOB_TRANSITIONS)
    assert {state: make().state for state, make in IN_STATE.items()} == {
        state: state for state in PrefillState
    }


@pytest.mark.parametrize(("state", "event"), ILLEGAL_JOB_EVENTS)
def test_an_illegal_job_event_raises_and_changes_nothing(state: JobState, event: JobEvent) -> None:
    """What the engine may not do is our error; nothing is sent."""
    session = WITH_JOB[state]()
    before = session.statistics()

    with pytest.raises(LocalProtocolError):
        JOB_EVENTS[event](session)

    assert session.statistics() == before
    assert session.receive(CANCEL) != ()


def test_a_failure_of_a_job_that_never_started_raises_and_changes_nothing() -> None:
    """Only an engine that works can fail."""
    session = make_queued_job()

    with pytest.raises(LocalProtocolError):
        session.engine_failed(21, FAILURE)

    assert session.statistics().num_jobs == 1


@pytest.mark.parametrize("state", [state for state in PrefillState if state is not PrefillState.ATTACHING])
def test_an_attachment_nobody_asked_for_raises_and_changes_nothing(state: PrefillState) -> None:
    """Welcome answers exactly one Hello; a session that closed meanwhile stays closed."""
    session = IN_STATE[state]()
    before = session.statistics()

    with pytest.raises(LocalProtocolError):
        session.attached(NONCE)

    assert session.statistics() == before


@pytest.mark.parametrize("state", [PrefillState.ATTACHING, PrefillState.OPEN])
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
    assert session.statistics().unknown_messages == 1


# ------------------------------------------------------------------------- greeting


def test_a_session_greets_attaches_and_welcomes() -> None:
    """The Welcome carries what was agreed and the nonce that was read."""
    session = make_session()

    assert session.receive(make_hello()) == (AttachSlab(make_hello().slab),)
    assert session.attached(NONCE) == (Send(make_welcome()),)
    assert session.agreement.version == 1


def test_a_hello_that_does_not_fit_changes_nothing() -> None:
    """The refusal is raised before anything is mapped."""
    session = make_session()
    misfit = make_hello(make_identity(make_geometry(head_dim=16)))

    with pytest.raises(GeometryMismatch):
        session.receive(misfit)

    assert session.state is PrefillState.WAITING


# ------------------------------------------------------------------------- a walk


def test_a_job_walks_from_start_to_done() -> None:
    """Accepted and queued, told span by span, ended once."""
    session = make_open_prefill_session()

    assert session.receive(START) == (Send(PrefillAccepted(21, 1, 0)), Enqueue(START))
    assert session.engine_started(21)
    assert session.span_written(SPANS[0]) == (Send(SpanTold(SPANS[0])),)
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

    assert session.statistics().released_spans == 1
    assert session.statistics().ignored_releases == 1


@pytest.mark.parametrize("make_job", [make_queued_job, make_running_job, make_stopping_job])
def test_a_span_that_was_not_told_gives_no_credit(make_job: Callable[[], PrefillSession]) -> None:
    """Else its bytes would be written twice before decode has read them."""
    session = make_job()

    assert session.receive(ReleaseSpan(21, 1, 0)) == ()

    assert session.statistics().ignored_releases == 1


def test_a_span_dropped_after_a_cancel_gives_no_credit() -> None:
    """It was never told, so decode cannot have read it."""
    session = make_stopping_job()
    session.span_written(SPANS[0])

    assert session.receive(ReleaseSpan(21, 1, 0)) == ()


@pytest.mark.parametrize("release", [ReleaseSpan(21, 2, 0), ReleaseSpan(22, 1, 0)])
def test_credit_of_another_attempt_or_of_no_job_is_unknown(release: ReleaseSpan) -> None:
    """It is late; the live job keeps what it holds."""
    session = make_running_job()
    session.span_written(SPANS[0])

    assert session.receive(release) == ()

    assert session.statistics().unknown_messages == 1
    assert session.statistics().released_spans == 0


# ------------------------------------------------------------------- refused starts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": ()}, "token_ids has 0 tokens, allowed 1 to 13"),
        ({"token_ids": (1,) * 14}, "token_ids has 14 tokens, allowed 1 to 13"),
        ({"token_ids": (1, 11, 2)}, "token_ids has 11, the vocabulary ends at 11"),
        ({"first_token": 5}, "first_token is 5, allowed 0 to 4"),
        ({"slot_offset": 65_536 - 64}, "the slab at 65536"),
        ({"slot_size": 1 << 40}, "the slab at 65536"),
        ({"slot_offset": 12_288 - 64}, "overlaps [4096, 12288) of transfer 21"),
        ({"slot_offset": 0}, "overlaps [4096, 12288) of transfer 21"),
    ],
)
def test_a_start_that_cannot_be_served_is_refused_alone(changes: dict[str, object], words: str) -> None:
    """Rule 8: the refusal names field, value and limit, and the neighbour runs on."""
    session = make_running_job()
    wrong = replace(START, transfer_id=22, **changes)  # type: ignore[arg-type]

    actions = session.receive(wrong)

    (refusal,) = sent(actions)
    assert len(actions) == 1
    assert isinstance(refusal, PrefillFailed)
    assert (refusal.transfer_id, refusal.attempt, refusal.reason) == (22, 1, "START_REFUSED")
    assert words in refusal.message
    assert session.statistics().num_jobs == 1


@pytest.mark.parametrize(("offset", "size"), [(12_288, 4096), (0, 4096)])
def test_slots_may_touch(offset: int, size: int) -> None:
    """Half-open ranges that meet share no byte."""
    session = make_running_job()

    session.receive(renamed(START, 22, Range(offset, offset + size)))

    assert session.statistics().num_jobs == 2
    session.check_integrity()


def test_a_start_above_the_concurrency_is_refused() -> None:
    """A2: told at once, so that decode frees its reservation."""
    session = make_open_prefill_session(replace(make_offer(), max_concurrency=1))
    session.receive(START)

    assert "max_concurrency is 1" in str(sent(session.receive(OTHER)))


def test_a_skip_is_refused_by_an_engine_that_cannot_skip() -> None:
    """First position zero is all that is allowed then."""
    session = make_open_prefill_session(replace(make_offer(), can_skip_prefix=False))

    assert "first_token is 2, allowed 0 to 0" in str(sent(session.receive(replace(START, first_token=2))))


def test_a_mode_that_was_not_agreed_is_refused() -> None:
    """The intersection of both offers binds both."""
    session = make_open_prefill_session(replace(make_offer(), modes=(TransferMode.WHOLE,)))

    assert "mode is stream, agreed ['whole']" in str(sent(session.receive(START)))


# ------------------------------------------------------------------- identity


@pytest.mark.parametrize("make", WITH_JOB.values())
def test_a_live_id_that_is_started_again_is_ignored(make: Callable[[], PrefillSession]) -> None:
    """I4, concurrent: any answer would name the first job, so it is counted, and the first is unharmed."""
    session = make()
    before = session.statistics()

    assert session.receive(replace(OTHER, transfer_id=21)) == ()
    assert session.statistics() == replace(before, repeated_starts=1)


@pytest.mark.parametrize("transfer_id", [21, 20])
def test_an_id_that_was_passed_is_refused(transfer_id: int) -> None:
    """I4, serial: used and ended, or skipped; the session goes on."""
    session = make_running_job()
    finish_job(session)
    session.receive(OTHER)

    (refusal,) = sent(session.receive(replace(START, transfer_id=transfer_id)))

    assert isinstance(refusal, PrefillFailed)
    assert refusal.transfer_id == transfer_id
    assert session.statistics().num_jobs == 1


def test_a_refused_start_uses_its_id_up() -> None:
    """A second try of the same request is another transfer."""
    session = make_open_prefill_session()
    session.receive(replace(START, token_ids=()))

    (refusal,) = sent(session.receive(START))

    assert isinstance(refusal, PrefillFailed)
    assert session.statistics().num_jobs == 0


def test_equal_ids_of_two_decode_services_are_two_jobs() -> None:
    """I6: each session has its own jobs and its own slab."""
    ours, theirs = make_running_job(), make_running_job()

    theirs.receive(CANCEL)

    assert ours.span_written(SPANS[0]) == (Send(SpanTold(SPANS[0])),)
    assert theirs.span_written(SPANS[0]) == ()
