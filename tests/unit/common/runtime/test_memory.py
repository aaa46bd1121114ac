"""Tests of `common/runtime/memory.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.runtime.memory import trim_memory

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
