"""Room in a ring: who has which bytes, who waits, and what ends the wait."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from common.errors import Cancelled, InvariantViolation, LeaseExpired
from common.kv.plan import PlannedSpan
from common.kv.ranges import Range
from prefill_service import credit
from prefill_service.credit import CONTESTED_WAIT_S, CreditRing, CreditTerms
from tests.support.clock import ManualClock

SHARES = (Range(0, 320), Range(320, 512))
WAIT_S = 7.0
LONG_S = 20.0
"""Longest time a thread of a test may take; it takes microseconds."""


class SteppingClock(ManualClock):
    """Says on a semaphore each time it is read, so that a test knows that a thread has come to wait."""

    def __init__(self) -> None:
        super().__init__(1_000)
        self.reads = threading.Semaphore(0)

    def now_ns(self) -> int:
        """Return the time it was moved to."""
        self.reads.release()
        return super().now_ns()


class Desk:
    """A ring, and a thread that asks it for room."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.clock, self.stop, self.contested = SteppingClock(), threading.Event(), threading.Event()
        self.ring = CreditRing(SHARES, CreditTerms(WAIT_S, self.stop, self.clock, self.contested))
        self._pool = pool

    def seal(self, sequence: int, length: int, group_index: int = 0) -> int:
        """Open a span and tell it; return where it lies."""
        planned = make_planned(length, group_index)
        offset = self.ring.open(planned)
        self.ring.sealed(sequence, planned)
        return offset

    def wait_for(self, length: int, group_index: int = 0) -> Future[int]:
        """Have a thread ask for room that there is not; return once it waits or is about to."""
        opened = self._pool.submit(self.ring.open, make_planned(length, group_index))
        for _ in range(2):
            assert self.clock.reads.acquire(timeout=LONG_S)
        return opened

    def contest(self) -> None:
        """Have another session wait for the engine."""
        self.contested.set()
        self.ring.wake()

    def release(self, sequence: int) -> None:
        """Give a span back, and see the thread that waits look at the clock."""
        self.ring.release(sequence)
        assert self.clock.reads.acquire(timeout=LONG_S)


def make_planned(length: int, group_index: int = 0) -> PlannedSpan:
    """Return a span of so many bytes; what it covers does not matter here."""
    return PlannedSpan(group_index, Range(0, 1), Range(0, 3), offset=9999, length=length, completed_by=0)


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A ring with everything free."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        desk = Desk(pool)
        yield desk
        desk.stop.set()
        desk.ring.wake()
        desk.ring.check_integrity()


def test_spans_of_a_group_lie_one_after_another_in_its_share(desk: Desk) -> None:
    """Rounded to 64 bytes, and never where another group's lie."""
    assert [desk.seal(0, 100), desk.seal(1, 64), desk.seal(2, 60, group_index=1)] == [0, 128, 320]


def test_a_released_span_s_bytes_are_used_again(desk: Desk) -> None:
    """The lowest room that is large enough."""
    desk.seal(0, 128)
    desk.seal(1, 128)

    desk.ring.release(0)

    assert desk.seal(2, 64) == 0
    assert desk.seal(3, 64) == 64
    assert desk.seal(4, 64) == 256


def test_a_group_fills_one_span_at_a_time(desk: Desk) -> None:
    """Else two open spans could wait for each other's room."""
    desk.ring.open(make_planned(64))

    with pytest.raises(InvariantViolation, match="group 0 has a span that is not sealed"):
        desk.ring.open(make_planned(64))


def test_groups_fill_their_spans_beside_each_other(desk: Desk) -> None:
    """A layer of one group may lie between two of another."""
    assert [desk.ring.open(make_planned(64, group_index=group)) for group in (0, 1)] == [0, 320]


def test_a_full_share_waits_for_a_release(desk: Desk) -> None:
    """The span gets the bytes that came back."""
    desk.seal(0, 192)
    desk.seal(1, 128)
    opened = desk.wait_for(192)

    desk.ring.release(0)

    assert opened.result(LONG_S) == 0
    assert desk.ring.statistics().num_waits == 1


def test_a_release_that_makes_too_little_room_is_not_enough(desk: Desk) -> None:
    """Also when the free bytes would do, but not next to each other."""
    for sequence in range(5):
        desk.seal(sequence, 64)
    opened = desk.wait_for(128)

    desk.ring.release(0)
    desk.ring.release(2)
    assert desk.clock.reads.acquire(timeout=LONG_S)
    assert not opened.done()
    desk.ring.release(1)

    assert opened.result(LONG_S) == 0


def test_room_in_another_group_s_share_is_not_taken(desk: Desk) -> None:
    """Else the other group could starve."""
    desk.seal(0, 320)
    desk.seal(1, 192, group_index=1)
    opened = desk.wait_for(64)

    desk.ring.release(1)
    assert desk.clock.reads.acquire(timeout=LONG_S)
    assert not opened.done()
    desk.ring.release(0)

    assert opened.result(LONG_S) == 0


def test_a_wait_that_reaches_its_bound_fails_and_says_for_what(desk: Desk) -> None:
    """C14: an error at the bound; nothing was dropped, and nothing changed."""
    desk.seal(0, 128)
    desk.seal(1, 192)
    desk.seal(2, 64, group_index=1)
    before = desk.ring.statistics().held_bytes
    opened = desk.wait_for(100)

    desk.clock.advance_s(WAIT_S)
    desk.ring.wake()

    with pytest.raises(LeaseExpired) as late:
        opened.result(LONG_S)
    sealed = "no credit for 100 bytes of group 0 within 7 s (2 spans sealed and not released)"
    assert str(late.value) == sealed
    assert desk.ring.statistics().held_bytes == before


@pytest.mark.parametrize(("bound_s", "is_contested"), [(WAIT_S, False), (CONTESTED_WAIT_S, True)])
def test_a_wait_below_its_bound_goes_on(desk: Desk, bound_s: float, is_contested: bool) -> None:
    """One nanosecond is left: a copy of milliseconds fails nobody."""
    desk.seal(0, 320)
    if is_contested:
        desk.contest()
    opened = desk.wait_for(64)

    desk.clock.advance_ns(round(bound_s * 1e9) - 1)
    desk.ring.wake()
    assert desk.clock.reads.acquire(timeout=LONG_S)
    assert not opened.done()
    desk.ring.release(0)

    assert opened.result(LONG_S) == 0


def test_all_waits_of_a_job_have_one_bound(desk: Desk) -> None:
    """A decode that gives one span back just before each bound cannot hold the engine span by span."""
    desk.seal(0, 320)
    for sequence in (1, 2):
        opened = desk.wait_for(320)
        desk.clock.advance_s(3)
        desk.release(sequence - 1)
        assert opened.result(LONG_S) == 0
        desk.ring.sealed(sequence, make_planned(320))
    opened = desk.wait_for(320)

    desk.clock.advance_s(1.5)
    desk.ring.wake()

    with pytest.raises(LeaseExpired, match="no credit for 320 bytes of group 0 within 7 s"):
        opened.result(LONG_S)
    assert desk.ring.statistics().num_waits == 3


def test_time_in_which_no_span_waits_is_free(desk: Desk) -> None:
    """A prompt may be computed for as long as it takes."""
    desk.seal(0, 320)
    desk.clock.advance_s(1000)
    opened = desk.wait_for(320)

    desk.clock.advance_s(6)
    desk.release(0)

    assert opened.result(LONG_S) == 0


def test_bytes_that_came_back_lengthen_the_bound(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    """A prompt of any size gets through to a decode that copies at a fair speed."""
    monkeypatch.setattr(credit, "BYTES_PER_WAIT", 640)
    desk.seal(0, 320)
    desk.ring.release(0)
    desk.seal(1, 320)
    opened = desk.wait_for(64)

    desk.clock.advance_s(10)
    desk.ring.wake()
    assert desk.clock.reads.acquire(timeout=LONG_S)
    assert not opened.done()
    desk.clock.advance_s(0.5)
    desk.ring.wake()

    with pytest.raises(LeaseExpired, match=r"within 10\.5 s"):
        opened.result(LONG_S)


def test_a_contested_wait_ends_at_the_short_bound(desk: Desk) -> None:
    """Somebody else could be served; what is waited for is said."""
    desk.seal(0, 320)
    desk.contest()
    opened = desk.wait_for(64)

    desk.clock.advance_s(CONTESTED_WAIT_S)
    desk.ring.wake()

    with pytest.raises(LeaseExpired) as late:
        opened.result(LONG_S)
    assert str(late.value) == (
        "no credit for 64 bytes of group 0 within 1 s while another session waits for the engine "
        "(1 spans sealed and not released)"
    )


def test_a_long_wait_that_becomes_contested_ends_at_once(desk: Desk) -> None:
    """It has had its time while nobody else waited."""
    desk.seal(0, 320)
    opened = desk.wait_for(64)
    desk.clock.advance_s(3)

    desk.contest()

    with pytest.raises(LeaseExpired, match="another session waits"):
        opened.result(LONG_S)


def test_a_wait_that_is_contested_no_more_has_its_whole_bound(desk: Desk) -> None:
    """Whoever waited has gone."""
    desk.seal(0, 320)
    desk.contest()
    opened = desk.wait_for(64)

    desk.contested.clear()
    desk.clock.advance_s(WAIT_S - 1)
    desk.ring.wake()
    assert desk.clock.reads.acquire(timeout=LONG_S)
    assert not opened.done()
    desk.ring.release(0)

    assert opened.result(LONG_S) == 0


def test_contested_waits_count_together(desk: Desk) -> None:
    """A decode that gives one span back just before each short bound gains nothing."""
    desk.seal(0, 320)
    desk.contest()
    opened = desk.wait_for(320)
    desk.clock.advance_s(0.75)
    desk.release(0)
    assert opened.result(LONG_S) == 0
    desk.ring.sealed(1, make_planned(320))
    opened = desk.wait_for(320)

    desk.clock.advance_s(0.25)
    desk.ring.wake()

    with pytest.raises(LeaseExpired):
        opened.result(LONG_S)


def test_bytes_that_came_back_make_up_for_contested_waits(
    monkeypatch: pytest.MonkeyPatch, desk: Desk
) -> None:
    """A prompt of any size gets through to a decode that copies at a fair speed."""
    monkeypatch.setattr(credit, "BYTES_PER_WAIT", 320 * WAIT_S)
    desk.seal(0, 320)
    desk.contest()
    for sequence in (1, 2, 3):
        opened = desk.wait_for(320)
        desk.clock.advance_s(0.75)
        desk.release(sequence - 1)
        assert opened.result(LONG_S) == 0
        desk.ring.sealed(sequence, make_planned(320))

    assert desk.ring.statistics().waited_ns == 2_250_000_000


def test_bytes_that_came_back_buy_no_longer_contested_wait(
    monkeypatch: pytest.MonkeyPatch, desk: Desk
) -> None:
    """A decode that stops after a good start holds the engine no longer than one that never begins."""
    monkeypatch.setattr(credit, "BYTES_PER_WAIT", 320)
    desk.seal(0, 320)
    desk.ring.release(0)
    desk.seal(1, 320)
    desk.contest()
    opened = desk.wait_for(64)

    desk.clock.advance_s(CONTESTED_WAIT_S)
    desk.ring.wake()

    with pytest.raises(LeaseExpired):
        opened.result(LONG_S)


def test_a_ring_says_since_when_it_waits(desk: Desk) -> None:
    """And that it does not any more; what waits took is kept."""
    desk.seal(0, 320)
    opened = desk.wait_for(64)
    assert (desk.ring.is_waiting, desk.ring.statistics().waiting_since_ns) == (True, 1_000)

    desk.clock.advance_ns(70)
    desk.ring.release(0)
    opened.result(LONG_S)

    assert (desk.ring.is_waiting, desk.ring.statistics().waiting_since_ns) == (False, None)
    assert desk.ring.statistics().waited_ns == 70


def test_a_stop_ends_the_wait_at_once(desk: Desk) -> None:
    """No time has to pass."""
    desk.seal(0, 320)
    opened = desk.wait_for(64)

    desk.stop.set()
    desk.ring.wake()

    with pytest.raises(Cancelled):
        opened.result(LONG_S)


def test_a_stop_before_the_wait_is_seen(desk: Desk) -> None:
    """Whoever stops need not know whether anybody waits."""
    desk.seal(0, 320)
    desk.stop.set()

    with pytest.raises(Cancelled):
        desk.ring.open(make_planned(64))


@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_a_release_of_what_is_not_told_is_our_mistake(desk: Desk, sequence: int) -> None:
    """Released before, open, or never made: the session lets none of them through."""
    desk.seal(0, 64)
    desk.ring.release(0)
    desk.ring.open(make_planned(64))
    before = desk.ring.statistics()

    with pytest.raises(InvariantViolation):
        desk.ring.release(sequence)

    assert desk.ring.statistics() == before
