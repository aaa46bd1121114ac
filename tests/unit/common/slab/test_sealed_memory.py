"""Memory that nobody can pull away: how it is made, and what is taken for it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, SlabNotShared
from common.slab.sealed_memory import examine_memory, make_memory
from tests.support.memories import BAD, SIZE, can_truncate

ROOT = Path(__file__).parents[4]


def test_nobody_can_change_its_length() -> None:
    """Neither side can end the other one by SIGBUS."""
    with os.fdopen(make_memory("m", SIZE, b"header"), "rb") as file:
        assert not can_truncate(file.fileno())


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
    make_memory("m", 262144, b"")
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


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_safe_to_map_is_refused(name: str) -> None:
    """Each by what is wrong with it, before a page of it is touched."""
    make, field = BAD[name]
    with os.fdopen(make(), "rb") as file:
        with pytest.raises(SlabNotShared) as caught:
            examine_memory(file.fileno(), SIZE)

        assert [difference.field for difference in caught.value.differences] == [field]
