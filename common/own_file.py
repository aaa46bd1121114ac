"""Opens files, and looks at folders, that this user alone writes; nothing that somebody put in their place.

Theory of operation: what stands at a path that others can reach may be a link to a file of this user, a FIFO
that makes whoever opens it wait, or a file whose owner reads and changes what is written into it. So it is
looked at before it is opened, opened without following a link or waiting, and looked at again: it may have
been replaced in between.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_own(path: Path, flags: int) -> int:
    """Open a file with `flags`, made with mode 0600 when it is not there; the caller closes the descriptor.

    Raises: `OSError` with the reason; what is no file of this user is never opened, or closed untouched.
    """
    _refuse(path, file_problem(path))
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        _refuse(path, _problem(os.fstat(fd)))
    except OSError:
        os.close(fd)
        raise
    return fd


def file_problem(path: Path) -> str | None:
    """Return why what stands at `path` is no file of this user; None when it is one, or nothing is there.

    Raises: `OSError` when nobody can tell.
    """
    try:
        return _problem(path.lstat())
    except FileNotFoundError:
        return None


def folder_problem(folder: Path) -> str | None:
    """Return why others can change what is in a folder; None when only this user can. Raises: `OSError`."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return _whose(found)
    if found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        return f"others can write into it (mode {mode:04o}); chmod go-w it once you know what is in it"
    return None


def _problem(found: os.stat_result) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return "is a link; name the file that it leads to"
    if not stat.S_ISREG(found.st_mode):
        return "is there and is not a file"
    return None if found.st_uid == os.geteuid() else _whose(found)


def _whose(found: os.stat_result) -> str:
    return f"belongs to user {found.st_uid}, this process is user {os.geteuid()}"


def _refuse(path: Path, problem: str | None) -> None:
    if problem is not None:
        raise OSError(errno.EPERM, problem, str(path))
