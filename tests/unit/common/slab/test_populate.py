"""Tests of `common/slab/populate.py`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.slab import populate as module
from common.slab.populate import populate

SIZE = 1 << 20


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    """A shared mapping of a file whose pages nobody has touched."""
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        file.write(b"kept")
        file.flush()
        with mmap.mmap(file.fileno(), SIZE) as mapped:
            yield mapped


def resident_bytes(mapping: mmap.mmap) -> int:
    """Return how much of the mapping this process has touched."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = f"{ctypes.addressof(ctypes.c_char.from_buffer(mapping)):x}-"
    index = next(number for number, line in enumerate(lines) if line.startswith(start))
    found = next(line for line in lines[index:] if line.startswith("Rss:"))
    return int(found.split()[1]) << 10


@pytest.mark.parametrize("can_advise", [True, False], ids=["advised", "touched"])
def test_every_page_is_there_and_no_byte_has_changed(
    mapping: mmap.mmap, can_advise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, and page by page where that does not know how."""
    if not can_advise:
        monkeypatch.setattr(module, "_advise", lambda mapping: errno.EINVAL)
    assert resident_bytes(mapping) < SIZE

    populate(mapping)

    assert resident_bytes(mapping) == SIZE
    assert mapping[:8] == b"kept\0\0\0\0"


def test_memory_that_is_not_there_is_an_error() -> None:
    """And no signal that ends the process: the file became shorter than its mapping."""
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        with mmap.mmap(file.fileno(), SIZE) as longer:
            file.truncate(0)

            with pytest.raises(OSError, match="Bad address"):
                populate(longer)


def test_a_mapping_can_be_closed_afterwards(mapping: mmap.mmap) -> None:
    """Nothing keeps the memory exported."""
    populate(mapping)

    mapping.close()

    assert mapping.closed
