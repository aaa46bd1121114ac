"""Memory that nobody can pull away: made by decode, examined by prefill before a byte of it is touched.

Theory of operation: a memfd with every byte allocated, which may never shrink, grow or change its seals.
Whoever maps a file that another process can truncate dies of SIGBUS at the next touch, and whoever maps one
whose bytes are not there takes them from its own memory. So prefill believes the kernel alone:

    owner       this user made it: nobody else could read or change the KV
    seals       SHRINK, GROW, SEAL: a named file of a tmpfs cannot have them
    pages       ordinary ones: of huge pages the host may have no other for a hole that is punched
    size        what decode says
    bytes       all of them are allocated

What is left to somebody who has the descriptor: writing, and punching holes, which read as zeros and are
filled again by whoever touches them.

Not here: how the descriptor crosses (`door.py`, `knock.py`), how much is taken (`mapped.py`).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat

from common.errors import ConfigError
from common.slab.refusal import not_shared

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What a slab has and for ever keeps."""

READ_ONLY = fcntl.F_SEAL_WRITE | 0x10
"""Any of these, F_SEAL_FUTURE_WRITE the second, forbids a mapping that writes."""

_MFD_NOEXEC_SEAL = 8
"""Since Linux 6.3; where vm.memfd_noexec is 2 nothing is made without it, older kernels refuse it."""

_BLOCK_BYTES = 512
"""Unit of st_blocks, whatever the file system."""

MemoryId = tuple[int, int]
"""Device and inode: the same for every descriptor of one memory."""


def make_memory(name: str, size_bytes: int, start: bytes) -> int:
    """Return a descriptor of new memory that begins with `start`; the caller closes it.

    `name` is what the maps of a process show.

    Raises: `ConfigError` when there is no room for all of it; nothing is kept then.
    """
    try:
        fd = _create(name)
    except OSError as error:
        raise ConfigError("slab_bytes", size_bytes, f"no memory can be made: {error.strerror}") from error
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.pwrite(fd, start, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise ConfigError("slab_bytes", size_bytes, f"no room for it: {error.strerror}") from error
    return fd


def examine_memory(fd: int, size_bytes: int) -> MemoryId:
    """Return what names the memory behind a descriptor that a peer handed over, once it can be mapped.

    Raises: `SlabNotShared` that names what is wrong with it.
    """
    try:
        status, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        found = f"got a descriptor of none: {error.strerror}"
        raise not_shared("slab.memory", "made sealed memory", found) from error
    if not stat.S_ISREG(status.st_mode):
        raise not_shared("slab.memory", "made sealed memory", "got a descriptor of none")
    if status.st_uid != os.geteuid():
        raise not_shared("slab.owner", f"uid {status.st_uid}", f"uid {os.geteuid()}")
    if seals & SEALS != SEALS or seals & READ_ONLY:
        raise not_shared("slab.seals", f"0x{seals:x}", f"0x{SEALS:x}, and none against writing")
    page_bytes = os.fstatvfs(fd).f_bsize
    if page_bytes != mmap.PAGESIZE:
        raise not_shared("slab.pages", f"{page_bytes} bytes", f"{mmap.PAGESIZE} bytes")
    if status.st_size != size_bytes:
        raise not_shared("slab.size_bytes", str(size_bytes), f"finds {status.st_size}")
    if status.st_blocks * _BLOCK_BYTES < size_bytes:
        raise not_shared("slab.bytes", f"{size_bytes} allocated", "finds some that are not")
    return status.st_dev, status.st_ino


def _create(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)
