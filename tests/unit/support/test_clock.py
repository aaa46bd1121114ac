"""A manual clock moves only when told, and never backwards."""

from __future__ import annotations

import pytest

from tests.support.clock import ManualClock


def test_manual_clock_stands_still_until_it_is_moved() -> None:
    """Only `advance` changes the time of a manual clock."""
    clock = ManualClock(start_ns=7)

    first_ns = clock.now_ns()
    clock.advance_ns(30)
    clock.advance_s(1.5)

    assert first_ns == 7
    assert clock.now_ns() == 37 + 1_500_000_000


def test_manual_clock_refuses_to_run_backwards() -> None:
    """A step below zero raises and changes nothing."""
    clock = ManualClock(start_ns=11)

    with pytest.raises(ValueError, match="backwards"):
        clock.advance_ns(-1)

    assert clock.now_ns() == 11
