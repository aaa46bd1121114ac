"""Only steps with every lane active count, from the first step of the lane that joined last."""

from __future__ import annotations

import pytest

from kvspan.bench.lanes import LaneWatch, prompt_lens, steps_s

MS = 1_000_000


def make_watch() -> LaneWatch:
    """Return a complete watch: lane 0 of 30 tokens joins at 10 ms, lane 1 of 20 tokens at 40 ms; 2 steps."""
    watch = LaneWatch((30, 20), num_steps=2)
    for time_ms, lane in ((10, 0), (20, 0), (30, 0), (40, 1), (50, 0), (50, 1), (63, 0), (63, 1), (79, 1)):
        watch.arrived(lane, 1, time_ms * MS)
    return watch


def test_interval_is_complete_when_the_last_lane_has_made_its_steps() -> None:
    """Its first token comes from the prompt, one more step aligns the interval, then steps count."""
    watch = LaneWatch((30,), num_steps=2)
    states = []
    for time_ms in (10, 20, 30, 40):
        watch.arrived(0, 1, time_ms * MS)
        states.append(watch.is_complete)

    assert states == [False, False, False, True]


def test_interval_waits_for_every_lane() -> None:
    """A batch that is not full yet is not what was asked for."""
    watch = LaneWatch((30, 20), num_steps=1)
    watch.arrived(0, 9, 10 * MS)

    assert not watch.is_complete


def test_steps_are_those_of_the_last_lane() -> None:
    """From its first step at 50 ms: 13 ms and 16 ms."""
    assert make_watch().interval().step_s == pytest.approx((0.013, 0.016))


def test_tokens_of_all_lanes_inside_the_interval_count() -> None:
    """After 50 ms: one of lane 0 and two of lane 1."""
    assert make_watch().interval().num_tokens == 3


def test_context_is_what_the_lanes_had_seen_on_average() -> None:
    """At 50 ms lane 0 has 30 + 4 tokens, lane 1 has 20 + 2."""
    interval = make_watch().interval()

    assert interval.tokens_before == (4, 2)
    assert interval.context_tokens == (34 + 22) / 2


def test_early_lanes_get_shorter_prompts_in_the_next_round() -> None:
    """What a lane generates before the interval is taken off its prompt, down to a least length."""
    assert prompt_lens(50, (30, 2, 49)) == (20, 48, 16)


def test_durations_lie_between_consecutive_times() -> None:
    """One less than there are times."""
    assert steps_s((1_000_000_000, 1_500_000_000, 3_500_000_000)) == (0.5, 2.0)
