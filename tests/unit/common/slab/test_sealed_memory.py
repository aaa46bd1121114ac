"""Memory that nobody can pull away: how it is made, and what is taken for it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError, SlabNotShared
from common.slab.sealed_memory import SEALS, examine_memory, make_memory

SIZE = 3 * 4096
ROOT = Path(__file__).parents[4]
FUTURE_WRITE = 0x10
PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""


def punch(fd: int, start: int, length: int) -> None:
    """Give the memory of some bytes back; they read as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    assert libc.fallocate(fd, PUNCH_HOLE, start, length) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.parametrize("change", [lambda fd: os.ftruncate(fd, 0), lambda fd: os.ftruncate(fd, 2 * SIZE)])
def test_nobody_can_change_its_length(change: Callable[[int], None]) -> None:
    """Neither side can end the other one by SIGBUS."""
    fd = make_memory("m", SIZE, b"header")
    with os.fdopen(fd, "rb"), pytest.raises(PermissionError):
        change(fd)


def test_nobody_can_change_its_seals() -> None:
    """One who seals it against writing would break every later mapping."""
    with os.fdopen(make_memory("m", SIZE, b"header"), "rb") as file, pytest.raises(PermissionError):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_it_begins_with_its_header_and_every_byte_is_there() -> None:
    """What it costs is paid when it is made; no child of this process inherits it."""
    with os.fdopen(make_memory("m", SIZE, b"header"), "rb") as file:
        assert examine_memory(file.fileno(), SIZE) == (
            os.fstat(file.fileno()).st_dev,
            os.fstat(file.fileno()).st_ino,
        )
        assert file.read(8) == b"header\0\0"
        assert not os.get_inheritable(file.fileno())


def test_it_is_made_by_a_kernel_that_knows_no_seal_against_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 6.3 refuses the flag."""
    create = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & 8:
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)

    with os.fdopen(make_memory("m", SIZE, b"header"), "rb") as file:
        assert examine_memory(file.fileno(), SIZE)


_LIMITED = """
import os, resource
from common.errors import ConfigError
from common.slab.sealed_memory import make_memory
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
before = os.listdir("/proc/self/fd")
try:
    make_memory("m", 12288, b"")
except ConfigError as error:
    print(error, os.listdir("/proc/self/fd") == before)
"""


def test_it_is_refused_where_there_is_no_room_for_all_of_it() -> None:
    """An error with the number and no signal; nothing is kept."""
    command = [sys.executable, "-c", _LIMITED]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)

    assert done.stdout == f"slab_bytes={SIZE}: no room for it: File too large True\n"


def test_no_room_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says so while the bytes are allocated, and not when they are touched."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(ConfigError, match=f"slab_bytes={SIZE}: no room for it: No space left on device"):
        make_memory("m", SIZE, b"")


def memfd(size_bytes: int = SIZE, seals: int = SEALS, flags: int = 0, *, is_there: bool = True) -> int:
    """Return memory as a peer may make it."""
    fd = os.memfd_create("peer", os.MFD_ALLOW_SEALING | flags)
    if is_there:
        os.posix_fallocate(fd, 0, size_bytes)
    else:
        os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def punched() -> int:
    """Return memory of which a page was given back."""
    fd = memfd()
    punch(fd, 4096, 4096)
    return fd


def named_file(folder: str) -> int:
    """Return a file of the right size that lies in a folder."""
    fd = os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    os.posix_fallocate(fd, 0, SIZE)
    return fd


def huge_pages() -> int:
    """Return memory of huge pages, of which a hole may find no other."""
    try:
        return memfd(2 << 20, flags=os.MFD_HUGETLB | os.MFD_HUGE_2MB, is_there=False)
    except OSError as error:
        pytest.skip(f"no huge pages here: {error.strerror}")


def of_another_user() -> int:
    """Return memory that somebody else owns."""
    if os.geteuid() != 0:
        pytest.skip("only root gives away what it made")
    fd = memfd()
    os.fchown(fd, 4321, -1)
    return fd


def pipe() -> int:
    """Return the reading end of a pipe."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader


BAD: dict[str, tuple[Callable[[], int], str]] = {
    "unsealed": (lambda: memfd(seals=0), "slab.seals"),
    "shrinks": (lambda: memfd(seals=SEALS & ~fcntl.F_SEAL_SHRINK), "slab.seals"),
    "grows": (lambda: memfd(seals=SEALS & ~fcntl.F_SEAL_GROW), "slab.seals"),
    "takes seals": (lambda: memfd(seals=SEALS & ~fcntl.F_SEAL_SEAL), "slab.seals"),
    "not for writing": (lambda: memfd(seals=SEALS | fcntl.F_SEAL_WRITE), "slab.seals"),
    "not for new writers": (lambda: memfd(seals=SEALS | FUTURE_WRITE), "slab.seals"),
    "file in a tmpfs": (lambda: named_file("/dev/shm"), "slab.seals"),
    "file on a disk": (lambda: named_file(str(ROOT)), "slab.memory"),
    "pipe": (pipe, "slab.memory"),
    "device": (lambda: os.open("/dev/zero", os.O_RDWR), "slab.memory"),
    "sparse": (lambda: memfd(is_there=False), "slab.bytes"),
    "punched": (punched, "slab.bytes"),
    "shorter": (lambda: memfd(SIZE - 4096), "slab.size_bytes"),
    "longer": (lambda: memfd(SIZE + 4096), "slab.size_bytes"),
    "huge pages": (huge_pages, "slab.pages"),
    "of another user": (of_another_user, "slab.owner"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_safe_to_map_is_refused(name: str) -> None:
    """Each by what is wrong with it, before a page of it is touched."""
    make, field = BAD[name]
    with os.fdopen(make(), "rb") as file:
        with pytest.raises(SlabNotShared) as caught:
            examine_memory(file.fileno(), SIZE)

        assert [difference.field for difference in caught.value.differences] == [field]
