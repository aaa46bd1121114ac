"""Pages come back exactly once, after the last who may touch them, whatever the order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvariantViolation
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation, ReservationState
from tests.support.factories import make_geometry, paged

EVENTS = st.lists(st.tuples(st.sampled_from(["hold", "drop"]), st.sampled_from(Holder)), max_size=20)


@given(events=EVENTS)
def test_a_reservation_follows_a_plain_set_of_holders(events: list[tuple[str, Holder]]) -> None:
    """Legal events change the set, illegal ones raise and change nothing; empty once means free for ever."""
    cache, freed = KVCache(paged(make_geometry()), (5,)), list[Reservation]()
    reservation = Reservation(cache.reserve(3, 2), freed.append)
    model = {Holder.CLIENT}

    for verb, holder in events:
        is_legal = bool(model) and (holder in model) == (verb == "drop")
        change = reservation.hold if verb == "hold" else reservation.drop
        if is_legal:
            change(holder)
            model ^= {holder}
        else:
            with pytest.raises(InvariantViolation):
                change(holder)
        assert reservation.holders == model
        assert (reservation.state is ReservationState.FREE) == (not model)
        assert freed == ([] if model else [reservation])
