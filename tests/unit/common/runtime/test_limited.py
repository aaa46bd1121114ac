"""Tests of `common/runtime/limited.py`."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from common.runtime.limited import run_limited

LONG_S = 30.0

pytestmark = pytest.mark.usefixtures("leak_check")


def spin() -> None:
    """Go on for ever, and take every error for a small one."""
    for _ in count():
        try:
            sum(range(1000))
        except Exception:  # noqa: BLE001 - as templates are written
            continue


def test_what_the_work_returns_is_returned() -> None:
    """And it has a thread of its own."""
    assert run_limited(threading.get_ident, LONG_S) != threading.get_ident()


def test_what_the_work_raises_is_raised() -> None:
    """Also what is no `Exception`."""

    class Panic(BaseException):
        pass

    def work() -> None:
        raise Panic("out of bounds")

    with pytest.raises(Panic, match="out of bounds"):
        run_limited(work, LONG_S)


def test_work_that_goes_on_for_ever_is_stopped() -> None:
    """Its thread is gone afterwards, whatever errors it handles."""
    with pytest.raises(TimeoutError, match=r"within 0\.02 s"):
        run_limited(spin, 0.02)
