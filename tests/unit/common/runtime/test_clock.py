"""Clocks never run backwards, and a manual one moves only when told."""

from __future__ import annotations

import time

import pytest

from common.runtime.clock import ManualClock, SystemClock


def test_system_clock_reads_the_monotonic_clock_of_the_host() -> None:
    """Timestamps compare with those of any other process of the host."""
    before_ns = time.monotonic_ns()

    now_ns = SystemClock().now_ns()

    assert before_ns <= now_ns <= time.monotonic_ns()


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
