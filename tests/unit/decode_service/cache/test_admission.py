"""Who gets pages, lane and slot, and who waits."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from common.errors import InvariantViolation, KVSpanError, PeerLost, PromptTooLong, QueueFull
from decode_service.cache.admission import Admission, Ticket
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, ReservationState
from tests.support.admissions import Desk, Slots, make_desk
from tests.support.factories import make_hybrid_geometry

LOST = PeerLost("the stream broke")


def test_a_request_that_fits_gets_everything_at_once() -> None:
    """Pages of every group, a lane and a slot."""
    desk = make_desk()

    request = desk.offer(prompt_len=9, max_new_tokens=4, slot_bytes=200)

    assert request.grant is not None
    assert request.grant.slot is not None
    assert request.grant.slot.size >= 200
    assert [len(table.pages) for table in request.grant.reservation.pages.tables] == [2, 3]
    assert desk.admission.statistics().lanes_used == 1


def test_a_local_request_gets_no_slot() -> None:
    """A prompt computed here needs no slab."""
    desk = make_desk()

    request = desk.offer(slot_bytes=None)

    assert request.grant is not None
    assert request.grant.slot is None
    assert desk.slots.num_leased == 0


@pytest.mark.parametrize(
    ("desk_of", "prompt_len", "slot_bytes"),
    [
        (lambda: make_desk(num_lanes=1), 3, 64),
        (lambda: make_desk(num_pages=(6, 3)), 9, 64),
        (lambda: make_desk(num_pages=(1, 9)), 3, 64),
        (lambda: make_desk(slab_bytes=128), 3, 128),
    ],
    ids=["lane", "pages of the full group", "pages of the windowed group", "slot"],
)
def test_a_request_that_lacks_one_thing_waits_and_holds_nothing(
    desk_of: Callable[[], Desk], prompt_len: int, slot_bytes: int
) -> None:
    """Pages, lane and slot, or nothing: what waits cannot block what runs."""
    desk = desk_of()
    first = desk.offer(prompt_len=prompt_len, max_new_tokens=1, slot_bytes=slot_bytes)
    before = (desk.cache.statistics(), desk.slots.num_leased)

    second = desk.offer(prompt_len=prompt_len, max_new_tokens=1, slot_bytes=slot_bytes)

    assert not second.is_granted
    assert (desk.cache.statistics(), desk.slots.num_leased) == before
    first.leave()
    assert second.is_granted


def test_requests_are_granted_in_order_of_arrival() -> None:
    """First come, first served."""
    desk = make_desk(num_lanes=1)
    requests = [desk.offer() for _ in range(4)]

    for position, request in enumerate(requests):
        assert [one.is_granted for one in requests] == [index <= position for index in range(4)]
        request.leave()


def test_a_small_request_never_overtakes_a_large_one() -> None:
    """The head of the queue would starve under a stream of small ones."""
    desk = make_desk(num_pages=(20, 10))
    running = desk.offer(prompt_len=9, max_new_tokens=1)
    large = desk.offer(prompt_len=37, max_new_tokens=1)

    desk.offer(prompt_len=1, max_new_tokens=1)

    assert desk.granted == [running]
    running.leave()
    assert desk.granted == [running, large]


def test_one_return_grants_as_many_as_fit() -> None:
    """A long request makes room for several short ones."""
    desk = make_desk(num_pages=(20, 10))
    large = desk.offer(prompt_len=40, max_new_tokens=1)
    small = [desk.offer(prompt_len=4, max_new_tokens=1) for _ in range(3)]

    large.leave()

    assert all(request.is_granted for request in small)


def test_a_full_queue_refuses_and_counts() -> None:
    """The wait is bounded: the client is told to try again."""
    desk = make_desk(num_lanes=1, queue_limit=2)
    for _ in range(3):
        desk.offer()

    with pytest.raises(QueueFull):
        desk.offer()

    statistics = desk.admission.statistics()
    assert (statistics.num_queued, statistics.num_refused) == (2, 1)


@pytest.mark.parametrize(("num_before", "has_room"), [(1, True), (2, False)])
def test_those_that_are_read_count_as_waiting(num_before: int, has_room: bool) -> None:
    """The next request is refused before it is read, when it could not even wait."""
    desk = make_desk(num_lanes=2, queue_limit=1)
    desk.offer()

    with nullcontext() if has_room else pytest.raises(QueueFull):
        desk.admission.check_room(num_before)

    assert desk.admission.statistics().num_refused == (not has_room)


def test_a_queue_of_none_refuses_whoever_would_wait() -> None:
    """A limit of zero serves what fits now and nothing else."""
    desk = make_desk(num_lanes=1, queue_limit=0)
    first = desk.offer()

    with pytest.raises(QueueFull):
        desk.offer()

    first.leave()
    assert desk.offer().is_granted


def test_what_never_fits_is_refused_before_it_is_queued() -> None:
    """With the numbers, at once, also when the queue is full."""
    desk = make_desk(num_pages=(20, 10), num_lanes=1, queue_limit=0)
    desk.offer()

    with pytest.raises(PromptTooLong) as refusal:
        desk.offer(prompt_len=40, max_new_tokens=2)

    assert (refusal.value.needed, refusal.value.limit) == (11, 10)
    assert desk.admission.statistics().num_refused == 0


def test_a_withdrawn_request_is_never_granted() -> None:
    """A cancel while waiting takes the ticket out, and the next one moves up."""
    desk = make_desk(num_pages=(20, 10))
    running = desk.offer(prompt_len=9, max_new_tokens=1)
    large, small = desk.offer(prompt_len=37), desk.offer(prompt_len=1)

    desk.admission.withdraw(large.ticket)

    assert small.is_granted
    running.leave()
    assert not large.is_granted


def test_withdrawing_what_is_not_queued_does_nothing() -> None:
    """A grant and a cancel may meet."""
    desk = make_desk()
    request = desk.offer()

    desk.admission.withdraw(request.ticket)

    assert desk.admission.statistics().lanes_used == 1


def test_a_lost_session_fails_exactly_those_that_wait_for_its_slots() -> None:
    """The others keep their places and move up."""
    desk = make_desk(num_lanes=1)
    running, other = desk.offer(), Slots(4096)
    waiting = [desk.offer(), desk.offer(slots=other), desk.offer(slot_bytes=None), desk.offer()]

    desk.admission.fail_waiting(desk.slots, LOST)

    assert [request.error for request in waiting] == [LOST, None, None, LOST]
    running.leave()
    assert [request.is_granted for request in waiting] == [False, True, False, False]
    assert running.error is None


def test_a_session_without_room_holds_up_its_own_requests_and_no_others() -> None:
    """A slow peer must not be felt by those who ask another one, or none."""
    desk, other = make_desk(slab_bytes=64), Slots(64)
    desk.offer(slot_bytes=64)

    blocked, behind = desk.offer(slot_bytes=64), desk.offer(slot_bytes=64)
    local, elsewhere = desk.offer(slot_bytes=None), desk.offer(slot_bytes=64, slots=other)

    assert [one.is_granted for one in (blocked, behind, local, elsewhere)] == [False, False, True, True]
    assert desk.admission.num_waiting(desk.slots) == 2
    assert desk.admission.num_waiting(other) == 0
    desk.admission.fail_waiting(desk.slots, LOST)
    assert (blocked.error, behind.error) == (LOST, LOST)
    for one in desk.granted:
        one.leave()
    desk.assert_idle()


def test_who_waits_for_a_slot_is_first_for_pages_once_it_is_there() -> None:
    """Those who overtook meanwhile do not starve it."""
    desk = make_desk(num_lanes=2, slab_bytes=64)
    holder, waiting = desk.offer(slot_bytes=64), desk.offer(slot_bytes=64)
    passing = [desk.offer(slot_bytes=None) for _ in range(2)]
    assert [one.is_granted for one in passing] == [True, False]

    holder.leave()

    assert waiting.is_granted
    assert not passing[1].is_granted
    waiting.leave()
    passing[0].leave()
    passing[1].leave()
    desk.assert_idle()


def test_a_grant_that_is_dropped_at_once_goes_to_the_next() -> None:
    """The call may have been cancelled in the turn in which its grant came."""
    desk = make_desk(num_lanes=1)
    running = desk.offer()
    gone, waiting = desk.offer(drops_at_once=True), desk.offer()

    running.leave()

    assert gone.reservation.state is ReservationState.FREE
    assert waiting.is_granted
    assert desk.admission.statistics().lanes_used == 1


def test_a_first_grant_that_is_dropped_at_once_leaves_nothing() -> None:
    """The same without a queue."""
    desk = make_desk()

    desk.offer(drops_at_once=True)

    desk.assert_idle()


def test_any_number_of_grants_may_be_dropped_at_once() -> None:
    """A mass cancel of a long queue ends like one of a short queue."""
    desk = make_desk(num_lanes=1, queue_limit=400)
    running = desk.offer()
    for _ in range(399):
        desk.offer(drops_at_once=True)
    last = desk.offer()

    running.leave()

    assert last.is_granted
    last.leave()
    desk.assert_idle()


def test_a_request_that_lost_its_grant_waits_ahead_of_all_others() -> None:
    """It was first before; a full queue is no reason to refuse it."""
    desk = make_desk(num_lanes=1, queue_limit=1)
    running, waiting = desk.offer(), desk.offer()

    again = desk.offer(is_first=True)

    assert desk.admission.statistics().num_queued == 2
    running.leave()
    assert desk.granted == [running, again]
    again.leave()
    assert waiting.is_granted


def test_a_request_that_lost_its_grant_is_granted_when_it_fits() -> None:
    """Also when larger ones wait."""
    desk = make_desk(num_pages=(20, 10))
    running = desk.offer(prompt_len=9)
    desk.offer(prompt_len=37)

    again = desk.offer(prompt_len=1, is_first=True)

    assert desk.granted == [running, again]


def test_statistics_tell_the_states_apart() -> None:
    """Transferring, decoding, and given up while somebody may still write."""
    desk = make_desk(num_lanes=3)
    reservations = [desk.offer().reservation for _ in range(3)]
    desk.offer()
    reservations[1].mark_published()
    reservations[2].hold(Holder.PRODUCER)
    reservations[2].drop(Holder.CLIENT)

    statistics = desk.admission.statistics()

    assert (statistics.num_transferring, statistics.num_decoding, statistics.num_draining) == (1, 1, 1)
    assert (statistics.lanes_used, statistics.num_lanes, statistics.num_queued) == (3, 3, 1)


def test_pages_taken_past_admission_are_found() -> None:
    """The cache's own count must be that of the live reservations."""
    desk = make_desk()
    desk.cache.reserve(3, 1)

    with pytest.raises(InvariantViolation, match="cache counts 1"):
        desk.admission.check_integrity()


def test_a_head_that_fits_and_waits_is_found() -> None:
    """A return that nobody announced would leave requests waiting for ever."""
    cache = KVCache(make_hybrid_geometry(windows=(6, None)), (6, 9))
    admission = Admission(cache, num_lanes=2, queue_limit=1)
    slots = Slots(0)
    errors: list[KVSpanError] = []
    admission.offer(Ticket(3, 1, slots, 64, lambda grant: None, errors.append))

    slots.grow(64)

    with pytest.raises(InvariantViolation, match="was not granted"):
        admission.check_integrity()
