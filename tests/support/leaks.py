"""Counts what a process holds, so that a test can show that it left nothing behind.

Theory of operation: a census lists threads, open descriptors, child processes and slab files. What is held
for the whole life of the process by a library (its event engine, its thread pool) is there before the test
or is named in KEPT_THREADS. Objects that only wait to be collected are collected first.
"""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

KEPT_THREADS = ("pytest_timeout", "asyncio_", "grpc_")
"""Prefixes of threads that belong to a library and stay for the life of the process."""

KEPT_TARGETS = ("anon_inode:", "/dev/urandom")
"""Descriptors that grpc and OpenSSL open once and keep."""


@dataclass(frozen=True, slots=True)
class Census:
    """What the process holds at one moment."""

    threads: frozenset[str]
    """Name and identity of each living Python thread."""

    descriptors: frozenset[str]
    """Number and target of each open descriptor."""

    children: frozenset[int]
    """Process ids of living children, grandchildren included."""

    slab_files: frozenset[str]
    """Names in the slab directory."""


def take_census(slab_dir: Path) -> Census:
    """Return what this process holds now."""
    gc.collect()
    return Census(
        threads=frozenset(
            f"{thread.name} ({thread.ident})"
            for thread in threading.enumerate()
            if not thread.name.startswith(KEPT_THREADS)
        ),
        descriptors=frozenset(_descriptors()),
        children=frozenset(child.pid for child in psutil.Process().children(recursive=True)),
        slab_files=frozenset(path.name for path in slab_dir.iterdir()) if slab_dir.exists() else frozenset(),
    )


def assert_no_leak(before: Census, slab_dir: Path) -> None:
    """Fail with everything that is held now and was not held `before`."""
    after = take_census(slab_dir)
    leaks = {
        "threads": after.threads - before.threads,
        "descriptors": after.descriptors - before.descriptors,
        "children": after.children - before.children,
        "slab files": after.slab_files - before.slab_files,
    }
    left = [f"{kind}: {', '.join(sorted(map(str, items)))}" for kind, items in leaks.items() if items]
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
            held.append(f"{name} -> {target}")
    return held
