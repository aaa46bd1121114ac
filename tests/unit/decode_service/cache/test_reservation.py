"""When the pages of a request may be given back."""

import itertools

import pytest

from common.errors import InvariantViolation
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation, ReservationState
from tests.support.factories import make_geometry, paged


class FreeCount:
    """Counts how often a reservation came back."""

    def __init__(self) -> None:
        self.freed: list[Reservation] = []
        pages = KVCache(paged(make_geometry()), (5,)).reserve(3, 2)
        self.reservation = Reservation(pages, self.freed.append)


@pytest.fixture
def count() -> FreeCount:
    """A reservation that its client holds."""
    return FreeCount()


def test_a_new_reservation_is_the_client_s_and_not_readable(count: FreeCount) -> None:
    """Reserved is not published."""
    assert count.reservation.holders == {Holder.CLIENT}
    assert count.reservation.state is ReservationState.RESERVED


@pytest.mark.parametrize(
    "order", list(itertools.permutations(Holder)), ids=lambda order: "-".join(h.value for h in order)
)
def test_only_the_last_drop_frees_and_it_frees_once(order: tuple[Holder, ...]) -> None:
    """Whatever order cancel, failure and success take, the pages come back exactly once."""
    count = FreeCount()
    for holder in set(Holder) - {Holder.CLIENT}:
        count.reservation.hold(holder)

    for holder in order[:-1]:
        count.reservation.drop(holder)
        assert not count.freed
    count.reservation.drop(order[-1])

    assert count.freed == [count.reservation]
    assert count.reservation.state is ReservationState.FREE
    assert not count.reservation.holders


def test_the_pages_stay_while_a_producer_writes_for_a_client_that_left(count: FreeCount) -> None:
    """A cancel is no proof that bytes stopped moving."""
    count.reservation.hold(Holder.PRODUCER)
    count.reservation.drop(Holder.CLIENT)

    assert not count.freed
    assert count.reservation.state is ReservationState.RESERVED


def test_holding_twice_is_refused(count: FreeCount) -> None:
    """One drop per holder must be enough."""
    count.reservation.hold(Holder.PRODUCER)

    with pytest.raises(InvariantViolation, match="producer cannot hold"):
        count.reservation.hold(Holder.PRODUCER)

    assert count.reservation.holders == {Holder.CLIENT, Holder.PRODUCER}


def test_dropping_what_is_not_held_is_refused(count: FreeCount) -> None:
    """A second drop would free the pages under another holder."""
    with pytest.raises(InvariantViolation, match="lane does not hold"):
        count.reservation.drop(Holder.LANE)

    assert not count.freed


@pytest.mark.parametrize("verb", ["hold", "drop"])
def test_a_free_reservation_is_of_no_more_use(count: FreeCount, verb: str) -> None:
    """Its pages may be somebody else's already."""
    count.reservation.drop(Holder.CLIENT)

    with pytest.raises(InvariantViolation, match="free"):
        (count.reservation.hold if verb == "hold" else count.reservation.drop)(Holder.CLIENT)
    with pytest.raises(InvariantViolation, match="free"):
        count.reservation.mark_published()

    assert count.freed == [count.reservation]


def test_publication_happens_once(count: FreeCount) -> None:
    """A published reservation cannot be published again."""
    count.reservation.mark_published()

    with pytest.raises(InvariantViolation, match="published"):
        count.reservation.mark_published()

    assert count.reservation.state is ReservationState.PUBLISHED


def test_the_state_is_free_before_the_owner_hears_of_it() -> None:
    """Who is told sees a reservation that cannot be held any more."""
    seen: list[ReservationState] = []
    pages = KVCache(paged(make_geometry()), (5,)).reserve(3, 2)
    reservation = Reservation(pages, lambda freed: seen.append(freed.state))

    reservation.drop(Holder.CLIENT)

    assert seen == [ReservationState.FREE]
