"""The shared-memory file of one session: made by decode, mapped by prefill, gone with its owner.

Theory of operation: the owner creates `kvspan-<random hex>.slab` in a configurable directory with O_EXCL
and mode 0600, takes an exclusive flock on it, reserves every byte with posix_fallocate (a full or small
file system is an error here and not a bus error later), maps and touches it, and writes the header:

    |0 header: magic, layout version, size, nonce, boot id |4096 data ......................| size
    offsets of slots and spans are counted from the start of the file

The peer maps the same file by name and reads the nonce; the session compares it, which proves that both
see the same memory. The owner then unlinks the name, after which not even SIGKILL leaves a file.

A file whose name is still there is either alive, and its owner holds the flock, or left over. The kernel
gives the lock back whenever and however the owner ends, in any PID namespace, so `sweep` needs no process
ids: what it can lock is dead. A creator that loses its file to a sweeper between open and lock sees that
the name no longer is its file and takes a new name.

Ownership: exactly one owner and any number of peers, each a context manager. A mapping outlives its name.
`close()` never unmaps under a user: memory goes when the segment is closed and the last view, or array over
a view, is freed. A copy by address must hold its view, or an array over it, until it has ended.

Not here: who gets which bytes (`allocator.py`), the comparison of nonces (`common/session`). No
`multiprocessing.shared_memory`: its resource tracker unlinks segments that others still use.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError, Difference, InvariantViolation, SlabNotShared
from common.excerpt import excerpt
from common.kv.ranges import Range
from common.slab.header import HEADER_BYTES, SlabHeader
from common.slab.populate import populate

_NAME = re.compile(r"kvspan-[0-9a-f]{24}\.slab")
_NAME_RANDOM_BYTES = 12
_CREATE_ATTEMPTS = 8
_NO_SPACE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM)
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK so that a FIFO under our name cannot hold us up."""


class SlabSegment:
    """One mapping of a slab, by its owner or by a peer."""

    def __init__(self, path: Path, fd: int, header: SlabHeader, *, is_owner: bool) -> None:
        """Map the file; the mapping keeps its own duplicate of `fd`, and with it the owner's lock.

        Use `create` or `attach`.
        """
        mapping = mmap.mmap(fd, header.size_bytes)
        populate(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._path = path
        self._inode = _inode(os.fstat(fd))
        self._header = header
        self._is_owner = is_owner
        self._is_unlinked = False
        self._memory = weakref.ref(self._mapping)

    @classmethod
    def create(
        cls,
        directory: Path,
        size_bytes: int,
        boot_id: str,
        *,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> SlabSegment:
        """Make a new slab and return its owner's mapping; the caller must close it.

        `size_bytes` is the size of the file, header included, a multiple of 4096.

        Raises: `ConfigError` when the size is not such a multiple, the directory cannot be used or has
        too little space; no file is left.
        """
        if size_bytes % HEADER_BYTES or size_bytes < 2 * HEADER_BYTES:
            problem = f"must be a multiple of {HEADER_BYTES}, at least {2 * HEADER_BYTES}"
            raise ConfigError("slab_bytes", size_bytes, problem)
        header = SlabHeader.make(size_bytes, boot_id, random_bytes)
        path, fd = _create_locked(directory, random_bytes)
        try:
            _reserve(fd, size_bytes, directory)
            os.pwrite(fd, header.pack(), 0)
            return cls(path, fd, header, is_owner=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, directory: Path, name: str, size_bytes: int) -> SlabSegment:
        """Map the slab that a peer made; the caller must close it.

        Raises: `SlabNotShared` when the name is not one of ours, or the file is missing, not ours to
        use, of another size, or not a slab; says what decode told and what was found.
        """
        if not _NAME.fullmatch(name):
            raise _not_shared("slab.name", excerpt(repr(name)), f"takes names like {_NAME.pattern}")
        path = directory / name
        fd = _open_existing(path)
        try:
            header = _read_header(fd, size_bytes)
            return cls(path, fd, header, is_owner=False)
        except OSError as error:
            found = f"cannot map it: {error.strerror}"
            raise _not_shared("slab.mapping", "mapped it", found) from error
        finally:
            os.close(fd)

    @property
    def name(self) -> str:
        """File name inside the slab directory, which each side may mount elsewhere."""
        return self._path.name

    @property
    def size_bytes(self) -> int:
        """Size of the file, header included."""
        return self._header.size_bytes

    @property
    def data(self) -> Range:
        """Offsets, from the start of the file, of the bytes that slots may use."""
        return Range(HEADER_BYTES, self.size_bytes)

    @property
    def nonce(self) -> bytes:
        """The owner's 32 random bytes, as read from the header when it was mapped."""
        return self._header.nonce

    @property
    def boot_id(self) -> str:
        """The boot id of the owner."""
        return self._header.boot_id

    @property
    def is_closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._mapping is None

    @property
    def is_unmapped(self) -> bool:
        """Tell whether the memory is gone: closed, and no view or array over one is left."""
        return self._memory() is None

    @property
    def buffer(self) -> memoryview:
        """Return a writable view of the data area: its byte 0 is byte 4096 of the file."""
        return self.view(self.data.start, len(self.data))

    def view(self, offset: int, length: int) -> memoryview:
        """Return a writable view of bytes of the data area; `offset` counts from the start of the file.

        The view stays valid after `close` and keeps the memory mapped.

        Raises: `ValueError` when some byte lies outside the data area or the segment is closed.
        """
        mapping = self._mapping
        if mapping is None:
            raise ValueError(f"slab {self.name} is closed")
        if length < 0 or not self.data.start <= offset <= self.data.stop - length:
            raise ValueError(f"bytes from {offset} to {offset + length} are not all in {self.data}")
        return memoryview(mapping)[offset : offset + length]

    def unlink(self) -> None:
        """Remove the name; mappings stay valid. Does nothing when it was removed before.

        Raises: `InvariantViolation` when called by a peer: only the owner unlinks.
        """
        if not self._is_owner:
            raise InvariantViolation(f"slab {self.name} is unlinked by a peer")
        if not self._is_unlinked:
            _unlink_if_same(self._path, self._inode)
        self._is_unlinked = True

    def close(self) -> None:
        """End this mapping, and as the owner also the name. Does nothing when closed before."""
        if self._mapping is None:
            return
        # Not mmap.close(): an array may use the bytes without holding a buffer (torch.frombuffer does not),
        # and would then point at nothing. Freeing the last reference unmaps.
        self._mapping = None
        if self._is_owner:
            self.unlink()

    def __enter__(self) -> SlabSegment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn(f"slab {self.name} was not closed", ResourceWarning, source=self, stacklevel=1)
            self.close()


def sweep(directory: Path) -> tuple[str, ...]:
    """Remove the slabs in `directory` whose owner has died; return their names.

    Never touches the file of a living owner, another name, or what is not a regular file. Safe to run
    from several services at once. What this user may not open or remove stays.

    Raises: `ConfigError` when the directory cannot be read.
    """
    try:
        names = sorted(filter(_NAME.fullmatch, os.listdir(directory)))
    except OSError as error:
        raise ConfigError("slab_dir", directory, error.strerror or str(error)) from error
    return tuple(name for name in names if _remove_if_dead(directory / name))


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not _try_lock(fd):
            return False
        return _unlink_if_same(path, _inode(status))
    except PermissionError:
        return False
    finally:
        os.close(fd)


def _create_locked(directory: Path, random_bytes: Callable[[int], bytes]) -> tuple[Path, int]:
    """Return the path and descriptor of a new, empty file that no sweeper can take for dead."""
    for _ in range(_CREATE_ATTEMPTS):
        path = directory / f"kvspan-{random_bytes(_NAME_RANDOM_BYTES).hex()}.slab"
        try:
            fd = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError("slab_dir", directory, error.strerror or str(error)) from error
        if _try_lock(fd) and _is_same(path, _inode(os.fstat(fd))):
            return path, fd
        os.close(fd)
    raise ConfigError("slab_dir", directory, f"no free name in {_CREATE_ATTEMPTS} attempts")


def _reserve(fd: int, size_bytes: int, directory: Path) -> None:
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise ConfigError("slab_dir", directory, error.strerror or str(error)) from error
        os.ftruncate(fd, 0)
        space = os.statvfs(directory)
        free = f"{directory} has {space.f_bavail * space.f_frsize} bytes free"
        raise ConfigError("slab_bytes", size_bytes, f"{error.strerror}; {free}") from error


def _open_existing(path: Path) -> int:
    try:
        return os.open(path, _OPEN_FLAGS)
    except OSError as error:
        found = f"cannot open it in --slab-dir: {error.strerror}"
        raise _not_shared("slab.name", "made it", found) from error


def _read_header(fd: int, size_bytes: int) -> SlabHeader:
    """Check the open file against what decode told, and return its header."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise _not_shared("slab.name", "made a file", "finds no regular file")
    if os.geteuid() not in (0, status.st_uid):
        raise _not_shared("slab.owner", f"uid {status.st_uid}", f"uid {os.geteuid()}")
    if status.st_size != size_bytes or size_bytes < 2 * HEADER_BYTES:
        raise _not_shared("slab.size_bytes", str(size_bytes), f"finds {status.st_size}")
    try:
        header = SlabHeader.unpack(os.pread(fd, HEADER_BYTES, 0))
    except ValueError as error:
        raise _not_shared("slab.header", "wrote one", f"finds none: {error}") from error
    if header.size_bytes != size_bytes:
        raise _not_shared("slab.size_bytes", str(size_bytes), f"header says {header.size_bytes}")
    return header


def _not_shared(field: str, decode_value: str, prefill_value: str) -> SlabNotShared:
    """Build a refusal that reads the same for every slab, without its random name and without paths."""
    return SlabNotShared([Difference(field, decode_value, prefill_value)])


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_same(path: Path, inode: tuple[int, int]) -> bool:
    try:
        return _inode(path.lstat()) == inode
    except FileNotFoundError:
        return False


def _unlink_if_same(path: Path, inode: tuple[int, int]) -> bool:
    """Remove the name when it still is that file; tell whether it was."""
    if not _is_same(path, inode):
        return False
    path.unlink(missing_ok=True)
    return True
