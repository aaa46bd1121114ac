"""Boot ids name one life of a process."""

from __future__ import annotations

import re

from common.runtime.boot import new_boot_id


def test_boot_ids_differ_between_two_lives() -> None:
    """No boot id is given twice."""
    assert len({new_boot_id() for _ in range(50)}) == 50


def test_boot_id_is_lower_case_hex() -> None:
    """A boot id can stand in a file name and in a log line."""
    assert re.fullmatch(r"[0-9a-f]{16}", new_boot_id())
