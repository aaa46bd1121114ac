"""The life of one job as the prefill service sees it."""

from collections.abc import Callable

import pytest

from common.errors import LocalProtocolError
from common.kv.ranges import Range
from common.session.messages import PrefillCancelled, PrefillDone, PrefillFailed
from common.session.prefill_job import JOB_TRANSITIONS, JobEvent, JobState, PrefillJob
from tests.support.sessions import SPANS, START, make_done

DONE: PrefillDone = make_done(START, SPANS)
CANCELLED = PrefillCancelled(21, 1)
EXPIRED = PrefillFailed(21, 1, "LEASE_EXPIRED", "not done within 30 s")


def make_job() -> PrefillJob:
    """Return a job that waits for an engine."""
    return PrefillJob(START)


def make_running() -> PrefillJob:
    """Return a job an engine works on; its spans 0 and 1 were sealed."""
    job = make_job()
    job.engine_started()
    job.seal(0)
    job.seal(1)
    return job


def make_stopping() -> PrefillJob:
    """Return a job that was cancelled while an engine worked on it."""
    job = make_running()
    job.stop(CANCELLED)
    return job


def make_gone() -> PrefillJob:
    """Return a job that ended well."""
    job = make_running()
    job.engine_ended(DONE)
    return job


IN_STATE: dict[JobState, Callable[[], PrefillJob]] = {
    JobState.QUEUED: make_job,
    JobState.RUNNING: make_running,
    JobState.STOPPING: make_stopping,
    JobState.GONE: make_gone,
}
DELIVER: dict[JobEvent, Callable[[PrefillJob], object]] = {
    JobEvent.ENGINE_STARTED: lambda job: job.engine_started(),
    JobEvent.ENGINE_ENDED: lambda job: job.engine_ended(DONE),
    JobEvent.STOP: lambda job: job.stop(EXPIRED),
}
UNLISTED = [
    (state, event) for state in JobState for event in JobEvent if (state, event) not in JOB_TRANSITIONS
]


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


def test_every_state_has_a_walk_and_gone_has_no_exit() -> None:
    """Reachable by the public calls alone, and a job ends once."""
    assert {state: make().state for state, make in IN_STATE.items()} == {state: state for state in JobState}
    assert not any(before is JobState.GONE for before, _ in JOB_TRANSITIONS)


@pytest.mark.parametrize(("state", "event"), JOB_TRANSITIONS)
def test_a_listed_event_leads_where_the_table_says(state: JobState, event: JobEvent) -> None:
    """The methods are the table, arrow by arrow."""
    job = IN_STATE[state]()

    DELIVER[event](job)

    assert job.state is JOB_TRANSITIONS[state, event]


@pytest.mark.parametrize(("state", "event"), UNLISTED)
def test_an_illegal_event_raises_and_changes_nothing(state: JobState, event: JobEvent) -> None:
    """What the engine may not do is our error; the verdict is what it was."""
    job = IN_STATE[state]()
    verdict = job.verdict

    with pytest.raises(LocalProtocolError):
        DELIVER[event](job)

    assert (job.state, job.verdict) == (state, verdict)


def test_a_job_that_was_not_stopped_ends_with_what_the_engine_said() -> None:
    """Well or badly, the outcome is passed on."""
    assert make_running().engine_ended(DONE) is DONE
    assert make_running().engine_ended(EXPIRED) is EXPIRED


def test_a_stopped_job_ends_with_its_verdict_whatever_the_engine_said() -> None:
    """The answer is the one that was asked for."""
    assert make_stopping().engine_ended(DONE) is CANCELLED


def test_the_first_verdict_stands() -> None:
    """Rule 6: a time limit after a cancel changes nothing."""
    job = make_stopping()

    job.stop(EXPIRED)

    assert job.verdict is CANCELLED


def test_a_stop_that_nobody_hears_leaves_no_verdict() -> None:
    """The session has ended, so there is nothing to answer."""
    job = make_running()

    job.stop(None)

    assert job.state is JobState.STOPPING
    assert job.verdict is None


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.RUNNING])
def test_a_span_is_told_only_while_the_engine_runs(state: JobState) -> None:
    """A span that is not sealed gives no credit either."""
    job = IN_STATE[state]()

    assert not job.seal(2)
    assert not job.release(2)


def test_the_release_of_a_told_span_counts_once() -> None:
    """Rule 5: a second release would let the producer write over bytes that decode reads."""
    job = make_running()

    assert job.release(1)
    assert not job.release(1)
    assert job.release(0)


def test_the_slot_is_where_the_start_says() -> None:
    """Half-open, in bytes of the slab."""
    assert make_job().slot == Range(4096, 12_288)
