"""Who gets pages, a lane and a place, and who waits."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from common.errors import InvariantViolation, PeerUnavailable, PromptTooLong, QueueFull
from decode_service.cache.reservation import Holder
from decode_service.request import Route
from tests.support.admissions import Desk, FakePlace, make_desk


def test_a_request_that_fits_gets_everything_at_once() -> None:
    """Pages of every group, a lane and a slot of the place where it begins."""
    desk = make_desk()

    offer = desk.offer(prompt_len=9, max_new_tokens=4)

    assert [len(table.pages) for table in offer.reservation.pages.tables] == [2, 3]
    assert desk.admission.statistics().lanes_used == 1
    assert (offer.place, desk.place.num_running) == ("peer", 1)


@pytest.mark.parametrize(
    ("desk_of", "prompt_len"),
    [
        (lambda: make_desk(num_lanes=1), 3),
        (lambda: make_desk(num_pages=(6, 3)), 9),
        (lambda: make_desk(num_pages=(1, 9)), 3),
        (lambda: make_desk(FakePlace(num_tokens=5)), 3),
        (lambda: make_desk(FakePlace(max_running=1)), 3),
    ],
    ids=["lane", "pages of the full group", "pages of the windowed group", "slot", "turn at the place"],
)
def test_a_request_that_lacks_one_thing_waits_and_holds_nothing(
    desk_of: Callable[[], Desk], prompt_len: int
) -> None:
    """Pages, lane and place, or nothing: what waits cannot block what runs."""
    desk = desk_of()
    first = desk.offer(prompt_len)
    before = (desk.cache.statistics(), desk.place.num_running)

    second = desk.offer(prompt_len)

    assert not second.is_granted
    assert (desk.cache.statistics(), desk.place.num_running) == before
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


def test_who_waits_is_bound_to_no_place() -> None:
    """Waiting for a lane, while the only peer goes and another one comes."""
    desk = make_desk(FakePlace("first"), FakePlace("second"), num_lanes=1)
    desk.join(1, None)
    running, waiting = desk.offer(), desk.offer()
    desk.join(1, FakePlace("second"))

    desk.leave(0)
    running.leave()

    assert waiting.place == "second"


def test_who_waits_for_a_slot_goes_to_whichever_place_has_one() -> None:
    """Also one that has come meanwhile."""
    desk = make_desk(FakePlace("first", max_running=1), FakePlace("second"))
    desk.join(1, None)
    desk.offer()
    waiting = desk.offer()

    desk.join(1, FakePlace("second"))

    assert waiting.place == "second"


def test_who_waits_fails_when_the_last_place_is_gone() -> None:
    """Not before, with the problems of the peers, and without touching those who have another place."""
    desk = make_desk(FakePlace("first"), FakePlace("second"), num_lanes=1)
    running = desk.offer()
    waiting, auto = desk.offer(), desk.offer(route=Route.AUTO)

    desk.leave(0)
    assert waiting.is_waiting
    desk.leave(1)

    assert isinstance(waiting.error, PeerUnavailable)
    assert "SHUTTING_DOWN" in str(waiting.error)
    assert auto.is_waiting
    running.leave()
    assert auto.place == "local"


def test_who_waits_fails_when_only_places_are_left_that_can_never_take_it() -> None:
    """And all that are configured are there to be asked; the numbers are of what is left."""
    desk = make_desk(FakePlace("large", max_running=1), FakePlace("small", max_prompt_tokens=4))
    desk.offer(9)
    waiting = desk.offer(9)

    desk.join(0, FakePlace("large", max_prompt_tokens=5))

    assert isinstance(waiting.error, PromptTooLong)
    assert (waiting.error.needed, waiting.error.limit) == (9, 5)


def test_a_request_without_a_place_is_refused_before_it_is_queued() -> None:
    """At once, also when the queue is full, and not as one for which the queue was too short."""
    desk = make_desk(num_lanes=1, queue_limit=0)
    desk.offer()
    desk.leave()

    with pytest.raises(PeerUnavailable):
        desk.offer()

    assert desk.admission.statistics().num_refused == 0


def test_a_place_without_room_holds_up_those_that_can_go_nowhere_else() -> None:
    """A slow peer must not be felt by those who fit another place, or ask none."""
    slow, other = FakePlace("slow", num_tokens=9), FakePlace("other", num_tokens=5)
    desk = make_desk(slow, other)
    desk.offer(9)

    blocked, behind = desk.offer(9), desk.offer(6)
    elsewhere, local = desk.offer(3), desk.offer(9, route=Route.LOCAL)

    assert [one.place for one in (blocked, behind, elsewhere, local)] == ["", "", "other", "local"]


def test_who_waits_for_two_places_is_overtaken_at_neither() -> None:
    """A large prompt would starve under small ones that each fit what is left."""
    desk = make_desk(FakePlace("first", num_tokens=9), FakePlace("second", num_tokens=9))
    running = [desk.offer(5), desk.offer(5)]
    large, small = desk.offer(8), desk.offer(1)
    assert (large.is_granted, small.is_granted) == (False, False)

    running[1].leave()

    assert [large.place, small.place] == ["second", "first"]


def test_who_waits_for_a_slot_is_first_for_pages_once_it_is_there() -> None:
    """Those who overtook meanwhile do not starve it."""
    desk = make_desk(FakePlace(max_running=1), num_lanes=2)
    holder, waiting = desk.offer(), desk.offer()
    passing = [desk.offer(route=Route.LOCAL) for _ in range(2)]
    assert [one.is_granted for one in passing] == [True, False]

    holder.leave()

    assert waiting.is_granted
    assert not passing[1].is_granted
    waiting.leave()
    passing[0].leave()
    passing[1].leave()
    desk.assert_idle()


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


def test_a_turn_that_was_missed_is_found() -> None:
    """A return that nobody announced would leave requests waiting for ever."""
    desk = make_desk(FakePlace(max_running=1))
    first, _ = desk.offer(), desk.offer()

    assert first.prefill is not None
    desk.place.end(first.prefill)

    with pytest.raises(InvariantViolation, match="was not granted"):
        desk.admission.check_integrity()
