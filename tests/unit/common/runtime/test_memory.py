"""Tests of `common/runtime/memory.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.runtime.memory import available_bytes, require_room, trim_memory

BLOCK_BYTES = 100_000
NUM_BLOCKS = 2000


def anonymous_bytes() -> int:
    """Return the private memory of this process that is resident."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_freed_memory_goes_back_to_the_system() -> None:
    """Blocks that were freed below one that is kept do not stay resident."""
    blocks = [bytes([number % 251]) * BLOCK_BYTES for number in range(NUM_BLOCKS)]
    kept = blocks[-1]
    before = anonymous_bytes()
    del blocks

    if not trim_memory():
        pytest.skip("this C library keeps what is freed")

    assert len(kept) == BLOCK_BYTES
    assert before - anonymous_bytes() > BLOCK_BYTES * NUM_BLOCKS // 2


def test_least_of_host_and_groups_is_what_can_be_taken(tmp_path: Path) -> None:
    """A container is killed at its own limit, however much the host has; files that were read count not."""
    meminfo, membership, inner = (
        tmp_path / "meminfo",
        tmp_path / "membership",
        tmp_path / "cgroup" / "a" / "b",
    )
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:  700 kB\n")
    membership.write_text("0::/a/b\n")
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("500000\n")
    (inner.parent / "memory.stat").write_text("file 400000\nanon 250000\nshmem 50000\n")

    assert available_bytes(meminfo, tmp_path / "cgroup", membership) == 200_000
    assert available_bytes(meminfo, tmp_path / "none", membership) == 700 * 1024
    assert available_bytes(tmp_path / "none", tmp_path / "none", membership) is None


def test_what_has_no_room_is_refused_with_both_numbers() -> None:
    """What is touched whole would end a process of the host that may be another one."""
    require_room("slab_bytes", 4096, "it takes", 4096)

    with pytest.raises(ConfigError, match=r"slab_bytes=1PiB: it takes 1073741824 MiB of memory, \d+ MiB are"):
        require_room("slab_bytes", "1PiB", "it takes", 1 << 50)
