"""What a peer may hand over in the place of a slab, and what it may do to one that it has."""

from __future__ import annotations

import ctypes
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.slab.sealed_memory import SEALS
from common.slab.segment import SlabSegment

SIZE = 256 << 10
FUTURE_WRITE = 0x10
OTHER_UID = 4321
_PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""


def descriptor_of(slab: SlabSegment) -> int:
    """Return a descriptor of the memory of a slab that this process has; its mapping owns it."""
    return next(
        int(fd.name)
        for fd in Path("/proc/self/fd").iterdir()
        if os.path.realpath(fd).startswith(f"/memfd:{slab.name}")
    )


def punch(fd: int, start: int = 0, length: int = SIZE) -> None:
    """Give the memory of some bytes back; they read as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate(fd, _PUNCH_HOLE, start, length):
        raise OSError(ctypes.get_errno(), "cannot punch a hole")


def can_truncate(fd: int) -> bool:
    """Try to make memory shorter, and longer; tell whether either worked."""
    length = os.fstat(fd).st_size
    for other in (0, 2 * length):
        try:
            os.ftruncate(fd, other)
        except PermissionError:
            continue
        return True
    return False


def memfd(size_bytes: int = SIZE, seals: int = SEALS, flags: int = 0, *, is_there: bool = True) -> int:
    """Return memory as a peer may make it."""
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    if is_there:
        os.posix_fallocate(fd, 0, size_bytes)
    else:
        os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _punched() -> int:
    """Return memory of which a page was given back before it is handed over."""
    fd = memfd()
    punch(fd, 4096, 4096)
    return fd


def _file_in(folder: str) -> int:
    """Return a file of the right size."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        return os.dup(file.fileno())


def _huge_pages() -> int:
    """Return memory of huge pages; of those a host may have none, and it is not asked for one."""
    return memfd(2 << 20, flags=os.MFD_HUGETLB | os.MFD_HUGE_2MB, is_there=False)


def _pipe() -> int:
    """Return the reading end of a pipe."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def _of_another_user() -> int:
    """Return memory that somebody else owns."""
    fd = memfd()
    os.fchown(fd, OTHER_UID, -1)
    return fd


BAD: dict[str, tuple[Callable[[], int], str]] = {
    "unsealed": (lambda: memfd(seals=0), "slab.seals"),
    "shrinks": (lambda: memfd(seals=SEALS & ~fcntl.F_SEAL_SHRINK), "slab.seals"),
    "grows": (lambda: memfd(seals=SEALS & ~fcntl.F_SEAL_GROW), "slab.seals"),
    "takes seals": (lambda: memfd(seals=SEALS & ~fcntl.F_SEAL_SEAL), "slab.seals"),
    "not for writing": (lambda: memfd(seals=SEALS | fcntl.F_SEAL_WRITE), "slab.seals"),
    "not for new writers": (lambda: memfd(seals=SEALS | FUTURE_WRITE), "slab.seals"),
    "file in a tmpfs": (lambda: _file_in("/dev/shm"), "slab.seals"),
    "file elsewhere": (lambda: os.open("/proc/version", os.O_RDONLY | os.O_CLOEXEC), "slab.memory"),
    "pipe": (_pipe, "slab.memory"),
    "device": (lambda: os.open("/dev/zero", os.O_RDWR), "slab.memory"),
    "sparse": (lambda: memfd(is_there=False), "slab.bytes"),
    "punched": (_punched, "slab.bytes"),
    "shorter": (lambda: memfd(SIZE - 4096), "slab.size_bytes"),
    "longer": (lambda: memfd(SIZE + 4096), "slab.size_bytes"),
}
"""How what a peer hands over is made, and the field by which it is refused."""

if os.geteuid() == 0:
    BAD["of another user"] = (_of_another_user, "slab.owner")

if Path("/sys/kernel/mm/hugepages/hugepages-2048kB").exists():
    BAD["huge pages"] = (_huge_pages, "slab.pages")
