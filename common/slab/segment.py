"""The shared memory of one session: made by decode, mapped by prefill, gone with its last mapping.

Theory of operation: the owner makes sealed memory (`sealed_memory.py`), maps and touches it, and opens a door
(`door.py`) at which the peer of the session fetches a descriptor. The memory begins with a header:

    |0 header: magic, layout version, size, nonce, boot id |4096 data ......................| size
    offsets of slots and spans are counted from the start of the memory

The peer examines what it got, enters it among the slabs that it has (`mapped.py`), maps it and reads the
nonce; the session compares it, which proves that both see the same memory. Then the door is closed. Nothing
has a name from there on, so that not even SIGKILL leaves anything.

Ownership: exactly one owner and one peer, each a context manager. `close()` never unmaps under a user: memory
goes when the segment is closed and the last view, or array over a view, is freed. A copy by address must hold
its view, or an array over it, until it has ended.

Not here: who gets which bytes (`allocator.py`), the comparison of nonces (`common/session`). No
`multiprocessing.shared_memory`: its resource tracker unlinks segments that others still use.
"""

from __future__ import annotations

import mmap
import os
import secrets
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.errors import ConfigError, InvariantViolation
from common.kv.ranges import Range
from common.slab.door import SlabDoor
from common.slab.header import HEADER_BYTES, SlabHeader
from common.slab.knock import knock
from common.slab.mapped import MappedSlabs
from common.slab.populate import populate
from common.slab.refusal import not_shared
from common.slab.sealed_memory import examine_memory, make_memory
from common.slab.socket_file import make_name


class SlabSegment:
    """One mapping of a slab, by its owner or by a peer."""

    def __init__(self, name: str, fd: int, header: SlabHeader, end: Callable[[], object]) -> None:
        """Map the memory, which is the caller's still; `end` is called once upon `close`.

        Use `create` or `attach`.
        """
        mapping = mmap.mmap(fd, header.size_bytes)
        populate(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._name = name
        self._header = header
        self._end = end
        self._door: SlabDoor | None = None
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
        """Make a new slab with a door in `directory`; the caller must have the door served, and close both.

        `size_bytes` is the size of the memory, header included, a multiple of 4096.

        Raises: `ConfigError` when the size is not such a multiple, there is too little memory, or the
        directory cannot be used; nothing is left.
        """
        if size_bytes % HEADER_BYTES or size_bytes < 2 * HEADER_BYTES:
            problem = f"must be a multiple of {HEADER_BYTES}, at least {2 * HEADER_BYTES}"
            raise ConfigError("slab_bytes", size_bytes, problem)
        name, header = make_name(random_bytes), SlabHeader.make(size_bytes, boot_id, random_bytes)
        fd = make_memory(name, size_bytes, header.pack())
        try:
            door = SlabDoor(directory, name, fd)
            try:
                slab = cls(name, fd, header, door.close)
            except BaseException:
                door.close()
                raise
        except OSError as error:
            raise ConfigError("slab_bytes", size_bytes, f"cannot map it: {error.strerror}") from error
        finally:
            os.close(fd)
        slab._door = door
        return slab

    @classmethod
    def attach(cls, directory: Path, name: str, size_bytes: int, mapped: MappedSlabs) -> SlabSegment:
        """Map the slab that a peer made, which is among `mapped` until closed; the caller must close it.

        Blocking: waits for the door of the peer, and touches the memory.

        Raises: `SlabNotShared` when the name is not one of ours, or what is found there is not this user's,
        not safe to map, of another size, too large, had by another session, or no slab; says what decode
        did and what was found.
        """
        mapped.check_size(size_bytes)
        fd = knock(directory, name)
        try:
            memory = examine_memory(fd, size_bytes)
            mapped.enter(memory, size_bytes)
            try:
                return cls(name, fd, _read_header(fd, size_bytes), partial(mapped.leave, memory))
            except BaseException:
                mapped.leave(memory)
                raise
        except OSError as error:
            found = f"cannot map it: {error.strerror}"
            raise not_shared("slab.mapping", "mapped it", found) from error
        finally:
            os.close(fd)

    @property
    def name(self) -> str:
        """Of the slab in logs and journals of both sides, and of its socket in the slab directory."""
        return self._name

    @property
    def door(self) -> SlabDoor:
        """Where the peer gets it.

        Raises: `InvariantViolation` when this is the peer: only the owner hands it over.
        """
        if self._door is None:
            raise InvariantViolation(f"slab {self.name} is handed over by a peer")
        return self._door

    @property
    def size_bytes(self) -> int:
        """Size of the memory, header included."""
        return self._header.size_bytes

    @property
    def data(self) -> Range:
        """Offsets, from the start of the memory, of the bytes that slots may use."""
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

    def view(self, offset: int, length: int) -> memoryview:
        """Return a writable view of bytes of the data area; `offset` counts from the start of the memory.

        The view stays valid after `close` and keeps the memory mapped.

        Raises: `ValueError` when some byte lies outside the data area or the segment is closed.
        """
        mapping = self._mapping
        if mapping is None:
            raise ValueError(f"slab {self.name} is closed")
        if length < 0 or not self.data.start <= offset <= self.data.stop - length:
            raise ValueError(f"bytes from {offset} to {offset + length} are not all in {self.data}")
        return memoryview(mapping)[offset : offset + length]

    def close(self) -> None:
        """End this mapping, and as the owner also the door. Does nothing when closed before."""
        if self._mapping is None:
            return
        # Not mmap.close(): an array may use the bytes without holding a buffer (torch.frombuffer does not),
        # and would then point at nothing. Freeing the last reference unmaps.
        self._mapping = None
        self._end()

    def __enter__(self) -> SlabSegment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn(f"slab {self.name} was not closed", ResourceWarning, source=self, stacklevel=1)
            self.close()


def _read_header(fd: int, size_bytes: int) -> SlabHeader:
    """Return the header of examined memory, which must be one and of the same size."""
    try:
        header = SlabHeader.unpack(os.pread(fd, HEADER_BYTES, 0))
    except ValueError as error:
        raise not_shared("slab.header", "wrote one", f"finds none: {error}") from error
    if header.size_bytes != size_bytes:
        raise not_shared("slab.size_bytes", str(size_bytes), f"header says {header.size_bytes}")
    return header
