"""Touches every page of a mapping without holding up the other threads of the process.

Theory of operation: the first touch of a page costs a fault, so a slab is touched before the first token
waits for it. `mmap` with MAP_POPULATE does it too, but Python's holds the interpreter lock meanwhile: four
gigabytes stop the event loop for seconds, and peers take that for silence. A foreign call lets it go.
"""

from __future__ import annotations

import ctypes
import mmap

_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; older kernels refuse it."""


def populate(mapping: mmap.mmap) -> None:
    """Map every page of a writable shared mapping; its bytes stay as they are."""
    if not _advise(mapping):
        for offset in range(0, len(mapping), mmap.PAGESIZE):
            mapping[offset]


def _advise(mapping: mmap.mmap) -> bool:
    """Ask the kernel to touch the pages, and tell whether it did."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return bool(madvise(address, len(mapping), _MADV_POPULATE_WRITE) == 0)
