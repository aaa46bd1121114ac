"""One prompt on the engine's thread."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from common.errors import Cancelled, EngineFailed, SpanOutOfRange
from common.kv.digest import DigestKind
from common.kv.ranges import Range
from common.kv.spans import Span
from common.session.messages import SourceTimings, TransferMode
from prefill_service.job import Job, run_job
from prefill_service.span_writer import SlotTarget
from tests.support.clock import ManualClock
from tests.support.factories import make_geometry
from tests.support.fakes import PatternEngine, one_hot
from tests.support.prefill_peers import Owner, make_engine
from tests.support.sessions import GRANULARITY, PROMPT, make_start, make_totals

SLOT = Range(4096, 12_288)
RING = Range(4096, 4096 + 384)
"""Room for one span of two tokens in one layer."""


def make_job(told: list[Span], slot: Range = SLOT, mode: TransferMode = TransferMode.STREAM) -> Job:
    """Return a job of five tokens accepted at 40 ns."""
    start = replace(make_start(), slot_size=len(slot), mode=mode)
    geometry, memory = make_geometry(), memoryview(bytearray(len(slot)))
    target = SlotTarget(start, geometry, geometry.dtypes, memory, DigestKind.OFF, told.append)
    return Job(Owner(3), target, accepted_ns=40, credit_wait_s=0)


def assert_released(job: Job) -> None:
    """Check that the job holds no memory any more."""
    with pytest.raises(ValueError, match="released"):
        job.target.memory.tobytes()


def test_a_finished_job_says_what_it_sealed_and_computed() -> None:
    """Totals of the spans, logits as little-endian floats, and when."""
    told: list[Span] = []
    job, engine, clock = make_job(told), make_engine(), ManualClock(50)
    engine.on_layer = lambda chunk, layer: clock.advance_ns(3)

    result = run_job(job, engine, GRANULARITY, clock)

    assert result.totals == make_totals(told)
    assert np.array_equal(np.frombuffer(result.logits, "<f4"), one_hot(11, PROMPT[-1] + 1))
    assert result.timings == SourceTimings(accepted_ns=40, started_ns=50, ended_ns=50 + 3 * 2 * 3)
    assert_released(job)


def test_a_job_is_named_by_session_and_transfer() -> None:
    """Transfer ids of two sessions may be equal."""
    assert make_job([]).key == (3, 21)


def stop_at_second_layer(job: Job, engine: PatternEngine) -> None:
    """Tell the job to stop while its first layer is computed."""
    engine.on_layer = lambda chunk, layer: job.stop.set()


def break_at_third_layer(job: Job, engine: PatternEngine) -> None:
    """Lose a device in the second chunk."""

    def on_layer(chunk: Range, layer: int) -> None:
        if chunk.start:
            raise EngineFailed("a device was lost")

    engine.on_layer = on_layer


@pytest.mark.parametrize(
    ("fault", "error"), [(stop_at_second_layer, Cancelled), (break_at_third_layer, EngineFailed)]
)
def test_a_job_that_ends_badly_lets_go_of_the_slot(
    fault: Callable[[Job, PatternEngine], None], error: type[Exception]
) -> None:
    """After the call no byte of the slot is written, however it ended."""
    job, engine = make_job([]), make_engine()
    fault(job, engine)

    with pytest.raises(error):
        run_job(job, engine, GRANULARITY, ManualClock())

    assert_released(job)


def test_a_deferred_job_has_no_ring() -> None:
    """It seals nothing before the end, so no credit could ever come: the slot is too small."""
    job = make_job([], RING, TransferMode.DEFERRED)

    with pytest.raises(SpanOutOfRange, match="slot_size is 384"):
        run_job(job, make_engine(), GRANULARITY, ManualClock())

    assert_released(job)


def test_credit_for_a_job_whose_slot_holds_everything_changes_nothing() -> None:
    """No byte of it is used twice."""
    told: list[Span] = []
    job = make_job(told)

    run_job(job, make_engine(), GRANULARITY, ManualClock())
    job.return_credit(0)

    assert job.ring is None
    assert len({span.offset for span in told}) == 6
