"""How much memory a process may still take, and how it gives back what was freed in it.

The C library keeps what is freed between other allocations; after a model was loaded and its weights were
packed that is most of the model's size (measured: 420 MB of 1,460 with a 135M model in float32).
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

from common.errors import ConfigError
from common.runtime.threads import CGROUP_MEMBERSHIP, CGROUP_ROOT, group_levels

MEMINFO = Path("/proc/meminfo")


def trim_memory() -> bool:
    """Return freed memory to the system, and tell whether the C library can do that."""
    gc.collect()
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    library.malloc_trim(0)
    return True


def available_bytes(
    meminfo: Path = MEMINFO, root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP
) -> int | None:
    """Return the bytes that can still be taken without swapping or being killed for it; None when unknown.

    The least of what the kernel could free and what every limit of a control group above this process leaves
    beside the memory that cannot be dropped: files that were read can, shared memory cannot.
    """
    rooms = [_number(meminfo, "MemAvailable:") * 1024 if meminfo.is_file() else None]
    for level in group_levels(root, membership):
        limit = level / "memory.max"
        if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
            held = _number(level / "memory.stat", "anon") + _number(level / "memory.stat", "shmem")
            rooms.append(max(0, int(text) - held))
    return min((room for room in rooms if room is not None), default=None)


def require_room(field: str, value: object, what: str, num_bytes: int) -> None:
    """Raise `ConfigError` that blames `field` when `what` takes more memory than there is: all is touched."""
    room = available_bytes()
    if room is not None and num_bytes > room:
        problem = f"{what} {num_bytes >> 20} MiB of memory, {room >> 20} MiB are available"
        raise ConfigError(field, value, problem)


def _number(path: Path, name: str) -> int:
    found = re.search(rf"^{name}\s+(\d+)", path.read_text(), re.M)
    return int(found[1]) if found else 0
