"""The clock of a service."""

from __future__ import annotations

import time

from common.runtime.clock import SystemClock


def test_system_clock_reads_the_monotonic_clock_of_the_host() -> None:
    """Timestamps compare with those of any other process of the host."""
    before_ns = time.monotonic_ns()

    now_ns = SystemClock().now_ns()

    assert before_ns <= now_ns <= time.monotonic_ns()
