"""What this user alone can change is used, and what somebody put in its place is left as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.own_file import file_problem, folder_problem, open_own

STRANGER = 12345

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def test_file_is_made_for_this_user_alone(tmp_path: Path) -> None:
    """Whatever the umask allows; one that is there is opened as it is."""
    path = tmp_path / "file"
    before = os.umask(0)
    try:
        os.close(open_own(path, os.O_RDWR))
    finally:
        os.umask(before)
    path.write_text("kept")
    os.close(open_own(path, os.O_RDWR))

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "kept"


def test_link_is_not_followed(tmp_path: Path) -> None:
    """Whoever plants one has a file of this user made or changed."""
    (tmp_path / "link").symlink_to(tmp_path / "target")

    with pytest.raises(OSError, match="is a link"):
        open_own(tmp_path / "link", os.O_RDWR)

    assert not (tmp_path / "target").exists()


@only_root
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """He reads what is written, and can change it; root is no exception."""
    path = tmp_path / "file"
    path.touch()
    os.chown(path, STRANGER, STRANGER)

    assert file_problem(path) == f"belongs to user {STRANGER}, this process is user 0"
    with pytest.raises(OSError, match=f"belongs to user {STRANGER}"):
        open_own(path, os.O_RDWR)


@only_root
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """What is in it is his."""
    os.chown(tmp_path, STRANGER, STRANGER)

    assert folder_problem(tmp_path) == f"belongs to user {STRANGER}, this process is user 0"


@pytest.mark.parametrize(("mode", "is_own"), [(0o700, True), (0o755, True), (0o775, False), (0o1777, False)])
def test_folder_is_refused_when_others_can_write_into_it(tmp_path: Path, mode: int, is_own: bool) -> None:
    """A sticky one too: others can put something there before this user does."""
    tmp_path.chmod(mode)
    expected = f"others can write into it (mode {mode:04o}); chmod go-w it once you know what is in it"

    assert folder_problem(tmp_path) == (None if is_own else expected)
