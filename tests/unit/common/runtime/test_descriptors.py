"""Tests of `common/runtime/descriptors.py`."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from common.runtime.descriptors import (
    FEW_LEFT,
    RECOVERED,
    RESERVE,
    ScarcityWatch,
    connection_limit,
    idle_limit_s,
    num_left,
    raise_limit,
)


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Return the limits of this process, and put them back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    """A shell's default of 1,024 is no wish of an operator."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))

    assert raise_limit() == limits[1]

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]


def test_what_is_left_shrinks_with_each_descriptor(limits: tuple[int, int]) -> None:
    """Down to none, which is no error of whoever looks."""
    before = num_left()
    taken = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, limits[1]))

    none_left = num_left()

    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.close(taken)
    assert (none_left, num_left()) == (0, before)


def test_connections_leave_a_reserve() -> None:
    """For peers, slabs and files; a few are taken even where there is none."""
    assert connection_limit(1000) == 1000 - RESERVE
    assert connection_limit(3) == 8


@pytest.mark.parametrize(("num_connections", "seconds"), [(8, 2.0), (640, 10.0), (1_000_000, 60.0)])
def test_idle_connections_end_sooner_where_there_is_room_for_few(
    num_connections: int, seconds: float
) -> None:
    """Whoever comes next then waits no longer than that."""
    assert idle_limit_s(num_connections) == seconds


def test_a_shortage_is_told_once_until_it_is_over() -> None:
    """One that comes and goes around the mark is one."""
    watch = ScarcityWatch()
    seen = (RECOVERED + 1, FEW_LEFT, 3, FEW_LEFT + 1, FEW_LEFT, RECOVERED + 1, FEW_LEFT)

    assert [watch.is_due(left) for left in seen] == [False, True, False, False, False, False, True]
