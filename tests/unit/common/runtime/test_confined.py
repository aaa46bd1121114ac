"""Tests of `common/runtime/confined.py`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.runtime.confined import Confined, Ended

pytestmark = pytest.mark.usefixtures("leak_check")

LIMIT_S, ROOM_BYTES = 1.0, 64 << 20

LONG_S = 30.0


def make_work(said: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return work that does what it is told."""

    def work(order: Any) -> Any:
        match order:
            case "spin":
                while True:
                    pass
            case "native":
                return 7 ** (10**8)
            case "grow":
                return len(bytearray(10 * ROOM_BYTES))
            case "print":
                os.write(1, b"no answer\n")
            case "pid":
                return os.getpid()
        return order

    return said, work


@pytest.fixture(name="confined")
def make_confined() -> Iterator[Confined]:
    """Yield a process that is ready."""
    with Confined(make_work, "ready", limit_s=LIMIT_S, room_bytes=ROOM_BYTES) as confined:
        assert confined.start() == "ready"
        yield confined


@pytest.mark.parametrize("order", ["é\ud800\n", {"a": [1, None]}, "x" * 3_000_000, "print"])
def test_an_order_is_answered(confined: Confined, order: Any) -> None:
    """Whatever JSON can say, and whatever else is printed there."""
    assert confined.ask(order) == order


@pytest.mark.parametrize(
    ("order", "end"),
    [
        ("spin", "not ended within 1 s"),
        ("native", "not ended within 1 s"),
        ("grow", "not ended within 64 MiB of memory"),
    ],
)
def test_what_passes_a_limit_is_ended_and_replaced(confined: Confined, order: str, end: str) -> None:
    """The next order does not notice."""
    before = confined.ask("pid")

    with pytest.raises(Ended, match=end):
        confined.ask(order)

    assert confined.ask("pid") not in (before, os.getpid())


def test_a_process_that_somebody_killed_is_replaced(confined: Confined) -> None:
    """No order is lost with it."""
    assert confined.pid is not None
    os.kill(confined.pid, signal.SIGKILL)
    os.waitid(os.P_PID, confined.pid, os.WEXITED | os.WNOWAIT)

    assert confined.ask("hi") == "hi"


def test_it_can_be_closed_under_an_order() -> None:
    """A service that ends waits for nobody's template."""
    with Confined(make_work, "ready", limit_s=LONG_S, room_bytes=ROOM_BYTES) as confined:
        confined.start()
        ends: list[BaseException] = []

        def ask() -> None:
            try:
                confined.ask("spin")
            except Ended as end:
                ends.append(end)

        asking = threading.Thread(target=ask)
        asking.start()
        confined.close()
        asking.join(LONG_S)

        assert len(ends) == 1
        with pytest.raises(Ended):
            confined.ask("hi")
