"""A service takes its share of the cores that the process really has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.runtime.threads import available_cores, parse_cpu_max, quota_cores, resolve_threads, share_of


@pytest.mark.parametrize(
    ("cores", "num_services", "threads"),
    [(2, 2, 1), (1, 2, 1), (0.5, 2, 1), (7, 2, 3), (8, 2, 4), (9, 3, 3)],
)
def test_share_is_whole_cores_and_never_none(cores: float, num_services: int, threads: int) -> None:
    """Teams of all services together never exceed the cores, unless there is less than one each."""
    assert share_of(cores, num_services) == threads


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("300000 100000", 3.0), ("", None)]
)
def test_quota_is_read_from_cpu_max(text: str, cores: float | None) -> None:
    """Quota over period is the number of cores; the word max means no limit."""
    assert parse_cpu_max(text) == cores


def test_tightest_quota_on_the_path_counts(tmp_path: Path) -> None:
    """A group is bound by every quota above it."""
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    root = tmp_path / "cgroup"
    (root / "outer" / "inner").mkdir(parents=True)
    (root / "outer" / "cpu.max").write_text("200000 100000\n")
    (root / "outer" / "inner" / "cpu.max").write_text("500000 100000\n")

    assert quota_cores(root, membership) == 2.0


def test_no_quota_is_found_without_control_groups(tmp_path: Path) -> None:
    """A host without version 2 groups has no quota."""
    assert quota_cores(tmp_path / "absent", tmp_path / "none") is None


def test_cores_never_exceed_the_affinity_mask() -> None:
    """A pinned process counts only the cores it is pinned to."""
    assert 0 < available_cores() <= len(os.sched_getaffinity(0))


def test_configured_threads_are_taken_as_they_are() -> None:
    """Only 0 means the share of the host."""
    assert resolve_threads(5) == 5
    assert resolve_threads(0) == share_of(available_cores())
