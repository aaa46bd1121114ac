"""Where tests keep files: paths of unix sockets have to be short, and disks may be full."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_BASE = 30
"""Characters; what pytest and a test put behind it has to fit into the 107 of a socket's path."""


def short_folder(prefix: str) -> Path:
    """Make a folder below the usual place for temporary files, or below /tmp when that is too long."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=usual if len(usual) <= LONGEST_BASE else "/tmp"))


@contextmanager
def full_disk(left: int) -> Iterator[None]:
    """Let no file of this process grow beyond `left` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
