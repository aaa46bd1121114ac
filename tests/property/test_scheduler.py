"""Whatever joins, leaves and fails: every lane ends once, and none is fed a row of another."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Cancelled
from decode_service.generate.scheduler import Event, Scheduler
from tests.support.scripted_lane import ScriptedLane

EVENTS = st.sampled_from(["join", "cancel", "cannot_step", "cannot_sample", "step", "step", "fail"])


@given(script=st.lists(st.tuples(EVENTS, st.integers(0, 7)), max_size=60))
@settings(max_examples=200)
def test_every_lane_ends_once_and_gets_its_own_rows(script: list[tuple[str, int]]) -> None:
    """A lane gets a token a step while it is active, all of them its own, then exactly one last event."""
    scheduler: Scheduler[ScriptedLane] = Scheduler()
    lanes: list[ScriptedLane] = []
    events: list[Event[ScriptedLane]] = []

    def play(name: str, number: int) -> None:
        if name == "join":
            lanes.append(ScriptedLane(chr(ord("A") + len(lanes)), num_tokens=number + 1))
            events.append(scheduler.join(lanes[-1]))
        elif name in ("step", "fail"):
            events.extend(scheduler.drop_cancelled())
            steps, failures = scheduler.plan()
            events.extend(failures)
            rows = [chr(step.token_id) for step in steps]
            is_failing = name == "fail"
            events.extend(scheduler.fail(OSError()) if is_failing else scheduler.complete(rows))  # type: ignore[arg-type]
        elif lanes:
            setattr(lanes[number % len(lanes)], "is_cancelled" if name == "cancel" else name, True)

    for name, number in script:
        play(name, number)
        scheduler.check_integrity()
    num_active = scheduler.num_active
    ends = scheduler.close(Cancelled("the end"))

    assert len(ends) == num_active
    assert Counter(id(event.lane) for event in [*events, *ends] if event.is_last) == Counter(map(id, lanes))
    assert all(row == lane.name for lane in lanes for row in lane.rows)
    assert scheduler.statistics().num_tokens == sum(lane.taken for lane in lanes)
