"""Touches every page of a mapping without holding up the other threads of the process.

Theory of operation: the first touch of a page costs a fault, so a slab is touched before the first token
waits for it. `mmap` with MAP_POPULATE does it too, but Python's holds the interpreter lock meanwhile: four
gigabytes stop the event loop for seconds, and peers take that for silence. A foreign call lets it go, and
says with an error what a touch would say with SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; older kernels refuse it."""


def populate(mapping: mmap.mmap) -> None:
    """Map every page of a writable shared mapping; its bytes stay as they are.

    Raises: `OSError` when the memory for it is not there.
    """
    problem = _advise(mapping)
    if problem == errno.EINVAL:
        for offset in range(0, len(mapping), mmap.PAGESIZE):
            mapping[offset]
    elif problem:
        raise OSError(problem, os.strerror(problem))


def _advise(mapping: mmap.mmap) -> int:
    """Have the kernel touch the pages; return its error, or 0."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return 0 if madvise(address, len(mapping), _MADV_POPULATE_WRITE) == 0 else ctypes.get_errno()
