"""Answers how many CPU threads a service may use.

Theory of operation: two thread teams that together exceed the cores of the host slow each other down
several times over, so each service takes its share: cores available to the process, divided by the
services on the host, at least one. Available is the smaller of the affinity mask and the CPU quota of
the control group (version 2), where the tightest quota on the path to the root counts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SERVICES_PER_HOST = 2
"""A prefill and a decode service."""

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another waits for it."""


def share_interpreter() -> None:
    """Let the event loop get its turn soon while a compute thread runs Python between two products.

    With the default of 5 ms a message waits 5 to 11 ms beside a busy thread (p99, measured), with this
    about 1 ms.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def resolve_threads(configured: int) -> int:
    """Return `configured` threads, or this service's share of the host when it is 0."""
    return configured or share_of(available_cores())


def share_of(cores: float, num_services: int = SERVICES_PER_HOST) -> int:
    """Return whole cores for one of `num_services` services; at least 1."""
    return max(1, int(cores / num_services))


def available_cores() -> float:
    """Return the cores this process may use: affinity and CPU quota, whichever is less."""
    allowed = len(os.sched_getaffinity(0))
    quota = quota_cores(CGROUP_ROOT, CGROUP_MEMBERSHIP)
    return allowed if quota is None else min(allowed, quota)


def quota_cores(root: Path, membership: Path) -> float | None:
    """Return the tightest quota between the control group named in `membership` and `root`; None without."""
    quotas = [_read_quota(level / "cpu.max") for level in group_levels(root, membership)]
    return min((quota for quota in quotas if quota is not None), default=None)


def parse_cpu_max(text: str) -> float | None:
    """Return the cores that a `cpu.max` file grants ("150000 100000" is 1.5); None for "max", no limit."""
    quota, _, period = text.strip().partition(" ")
    if quota == "max" or not period:
        return None
    return int(quota) / int(period)


def group_levels(root: Path, membership: Path) -> list[Path]:
    """Return the directories of this process's version 2 group and of all groups above it, up to `root`."""
    group = _own_group(root, membership)
    return [level for level in (group, *group.parents) if level.is_relative_to(root)]


def _own_group(root: Path, membership: Path) -> Path:
    """Return the directory of this process's version 2 group; `root` when it has none or none is visible."""
    if not membership.exists():
        return root
    for line in membership.read_text().splitlines():
        if line.startswith("0::"):
            return root / line.removeprefix("0::").strip().lstrip("/")
    return root


def _read_quota(path: Path) -> float | None:
    return parse_cpu_max(path.read_text()) if path.is_file() else None
