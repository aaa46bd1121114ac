"""Tests of `common/runtime/silence.py`."""

from __future__ import annotations

import pytest

from common.runtime.silence import SHORTEST_LIMIT_S, SilenceWatch
from tests.support.clock import ManualClock


def make_watch() -> tuple[SilenceWatch, ManualClock]:
    """Return a watch with a limit of three seconds, and its clock."""
    clock = ManualClock(start_ns=5)
    return SilenceWatch(3.0, clock), clock


def test_peer_counts_as_lost_when_it_was_silent_for_longer_than_the_limit() -> None:
    """Silence is counted from the last message."""
    watch, clock = make_watch()

    looks = []
    for _ in range(4):
        clock.advance_s(1.0)
        looks.append(watch.look())

    assert looks == [False, False, False, True]


def test_peer_is_alive_when_it_was_heard_between_looks() -> None:
    """Any message starts the count again."""
    watch, clock = make_watch()

    for _ in range(10):
        clock.advance_s(1.0)
        watch.heard()
        clock.advance_s(0.5)
        assert not watch.look()


def test_peer_is_not_blamed_when_this_process_was_stopped() -> None:
    """A process that slept has heard nothing through its own fault."""
    watch, clock = make_watch()
    clock.advance_s(60.0)

    assert not watch.look()
    clock.advance_s(2.0)
    assert not watch.look()
    clock.advance_s(1.5)
    assert watch.look()


@pytest.mark.parametrize("limit_s", [SHORTEST_LIMIT_S, 3.0, 600.0])
def test_pings_suffice_for_a_peer_with_the_shortest_limit(limit_s: float) -> None:
    """Each side judges by a limit of its own: a patient side must not ping less often than others need."""
    watch = SilenceWatch(limit_s, ManualClock(start_ns=5))

    assert watch.interval_s == SHORTEST_LIMIT_S / 3
    assert watch.limit_s == limit_s
