"""Which sequences are in the batch, and what takes them out."""

import pytest

from common.errors import Cancelled, EngineFailed, InvariantViolation
from decode_service.generate.answer import TokenEvent
from decode_service.generate.scheduler import Scheduler
from tests.support.scripted_lane import ScriptedLane

ROWS = [f"row {index}" for index in range(5)]
"""Stand-ins for the logits of a step."""


def make_batch(*lanes: ScriptedLane) -> Scheduler[ScriptedLane]:
    """Return a scheduler that these lanes have joined."""
    scheduler: Scheduler[ScriptedLane] = Scheduler()
    for lane in lanes:
        scheduler.join(lane)
    return scheduler


def batch_of(scheduler: Scheduler[ScriptedLane]) -> str:
    """Plan a step and return the names of its lanes."""
    return "".join(chr(step.token_id) for step in scheduler.plan()[0])


def complete(scheduler: Scheduler[ScriptedLane]) -> list[str]:
    """Complete a step; returns the lanes of its events, upper case where it was the last."""
    events = scheduler.complete(ROWS)  # type: ignore[arg-type]
    scheduler.check_integrity()
    return [event.lane.name.upper() if event.is_last else event.lane.name for event in events]


def test_a_request_for_one_token_never_becomes_active() -> None:
    """The first token comes from the handed-over logits and costs no step (F1, F2)."""
    scheduler: Scheduler[ScriptedLane] = Scheduler()

    event = scheduler.join(ScriptedLane("p", num_tokens=1))

    assert event.is_last
    assert isinstance(event.what, TokenEvent)
    assert scheduler.plan() == ([], [])
    assert scheduler.statistics().num_tokens == 1


def test_a_lane_joins_between_two_steps_behind_the_others() -> None:
    """Nobody waits for the batch to end."""
    scheduler = make_batch(ScriptedLane("p", 3))
    assert batch_of(scheduler) == "p"
    complete(scheduler)

    scheduler.join(ScriptedLane("a", 3))

    assert batch_of(scheduler) == "pa"
    assert complete(scheduler) == ["P", "a"]
    assert batch_of(scheduler) == "a"


def test_each_lane_gets_its_own_row() -> None:
    """A row belongs to the lane at its place in the plan, whoever left before."""
    lanes = [ScriptedLane(name) for name in "pqr"]
    scheduler = make_batch(*lanes)
    lanes[0].is_cancelled = True
    scheduler.drop_cancelled()
    lanes[1].cannot_step = True
    scheduler.join(ScriptedLane("s"))

    assert batch_of(scheduler) == "rs"
    complete(scheduler)

    assert [lane.rows for lane in lanes] == [[], [], ["row 0"]]


def test_a_cancelled_lane_leaves_between_two_steps() -> None:
    """Its client waits for nothing any more; the others go on."""
    gone, stays = ScriptedLane("p"), ScriptedLane("a")
    scheduler = make_batch(gone, stays)
    gone.is_cancelled = True

    (event,) = scheduler.drop_cancelled()

    assert event.lane is gone
    assert event.is_last
    assert isinstance(event.what, Cancelled)
    assert batch_of(scheduler) == "a"


def test_a_client_that_left_before_the_first_step_costs_no_token() -> None:
    """A cancel may come between publication and the batch."""
    scheduler: Scheduler[ScriptedLane] = Scheduler()

    event = scheduler.join(ScriptedLane("p", is_cancelled=True))

    assert isinstance(event.what, Cancelled)
    assert event.lane.taken == scheduler.num_active == 0


def test_a_lane_that_cannot_step_fails_alone() -> None:
    """One lane that has no part of the step is no reason to stop another (rule 8)."""
    broken = ScriptedLane("p", cannot_step=True)
    scheduler = make_batch(broken, ScriptedLane("a"))

    steps, (event,) = scheduler.plan()

    assert [chr(step.token_id) for step in steps] == ["a"]
    assert event.lane is broken
    assert event.is_last
    assert isinstance(event.cause, KeyError)
    assert str(event.what) == "engine failed: lane: KeyError"
    assert complete(scheduler) == ["a"]


class Panic(BaseException):
    """As the native code of a tokenizer raises it: no `Exception`."""


@pytest.mark.parametrize("error", [ValueError("no numbers"), Panic("out of bounds")])
def test_a_sample_that_fails_fails_its_lane_alone(error: BaseException) -> None:
    """Logits of one lane that are no numbers, or a panic, are no reason to stop another (rule 8)."""
    scheduler = make_batch(ScriptedLane("p", cannot_sample=True, sampling_error=error), ScriptedLane("a"))
    scheduler.plan()

    broken, whole = scheduler.complete(ROWS)  # type: ignore[arg-type]

    assert isinstance(broken.what, EngineFailed)
    assert broken.cause is error
    assert not whole.is_last
    assert batch_of(scheduler) == "a"


def test_a_step_that_fails_fails_the_lanes_it_had() -> None:
    """The KV of all their positions is undefined; the next lane finds an empty batch."""
    scheduler = make_batch(ScriptedLane("p"), ScriptedLane("a"))
    scheduler.plan()

    events = scheduler.fail(RuntimeError("a device was lost"))

    assert [event.lane.name for event in events] == ["p", "a"]
    assert all(event.is_last and "RuntimeError" in str(event.what) for event in events)
    assert scheduler.statistics().num_steps == scheduler.num_active == 0


def test_closing_ends_every_lane() -> None:
    """Their pages come back, and nobody waits for ever."""
    scheduler = make_batch(ScriptedLane("p"), ScriptedLane("a"))

    events = scheduler.close(Cancelled("shutting down"))

    assert [event.lane.name for event in events if event.is_last] == ["p", "a"]
    assert scheduler.num_active == 0


def test_a_lane_cannot_be_twice_in_the_batch() -> None:
    """A step would write its position twice."""
    lane = ScriptedLane("p")
    scheduler = make_batch(lane)
    lane.taken = 0
    scheduler.join(lane)

    with pytest.raises(InvariantViolation, match="twice"):
        scheduler.check_integrity()
