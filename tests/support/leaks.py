"""Counts what a process holds, so that a test can show that it left nothing behind.

Theory of operation: a census lists threads, open descriptors, child processes and slab sockets. What is held
for the whole life of the process by a library (its event engine, its thread pool) is there before the test
or is named in KEPT_THREADS. Objects that only wait to be collected are collected first. What stands in the
place of something of its kind is no leak: a pair that tests share may have opened another session meanwhile.
"""

from __future__ import annotations

import gc
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

KEPT_THREADS = ("pytest_timeout", "asyncio_", "grpc_")
"""Prefixes of threads that belong to a library and stay for the life of the process."""

KEPT_TARGETS = ("anon_inode:", "/dev/urandom")
"""Descriptors that grpc and OpenSSL open once and keep."""

NUMBERS = re.compile(r"\[\d+\]|[0-9a-f]{24}")
"""Of a socket or pipe, and of a slab."""


@dataclass(frozen=True, slots=True)
class Census:
    """What the process holds at one moment."""

    threads: Counter[str]
    """Living Python threads by their names."""

    descriptors: Counter[str]
    """Open descriptors by their targets, without the numbers of those that have no name."""

    children: Counter[str]
    """Process ids of living children, grandchildren included."""

    slab_sockets: Counter[str]
    """Names in the slab directory."""


def take_census(slab_dir: Path) -> Census:
    """Return what this process holds now."""
    gc.collect()
    return Census(
        threads=Counter(
            thread.name for thread in threading.enumerate() if not thread.name.startswith(KEPT_THREADS)
        ),
        descriptors=Counter(_descriptors()),
        children=Counter(str(child.pid) for child in psutil.Process().children(recursive=True)),
        slab_sockets=Counter(path.name for path in slab_dir.iterdir()) if slab_dir.exists() else Counter(),
    )


def assert_no_leak(before: Census, slab_dir: Path) -> None:
    """Fail with everything of which more is held now than was `before`."""
    after = take_census(slab_dir)
    leaks = {
        "threads": after.threads - before.threads,
        "descriptors": after.descriptors - before.descriptors,
        "children": after.children - before.children,
        "slab sockets": after.slab_sockets - before.slab_sockets,
    }
    left = [f"{kind}: {', '.join(sorted(items.elements()))}" for kind, items in leaks.items() if items]
    assert not left, "left behind: " + "; ".join(left)


def _descriptors() -> list[str]:
    held = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            # The descriptor that listed the directory.
            continue
        if not target.startswith(KEPT_TARGETS):
            held.append(NUMBERS.sub("", target))
    return held
