"""When the next slab is made for a peer that refused one."""

from __future__ import annotations

import pytest

from common.errors import Difference, PeerLost, SlabNotShared
from decode_service.prefill.slab_refusals import SlabRefusals
from tests.support.clock import ManualClock

REFUSAL = SlabNotShared([Difference("slab.socket", "made one", "finds none")])


def is_held_back(refusals: SlabRefusals, boot_id: str = "life-1") -> bool:
    """Tell whether no slab is made for that life of the peer."""
    try:
        refusals.check(boot_id)
    except SlabNotShared:
        return True
    return False


@pytest.mark.parametrize(("num_refused", "pause_s"), [(1, 5), (2, 10), (3, 20), (4, 40), (5, 60), (9, 60)])
def test_the_pause_doubles_up_to_a_minute(num_refused: int, pause_s: int) -> None:
    """A slab of gigabytes is not touched again and again for one who never takes it."""
    clock = ManualClock(7)
    refusals = SlabRefusals(clock)
    for _ in range(num_refused):
        refusals.note("life-1", REFUSAL)

    clock.advance_s(pause_s - 1)
    with pytest.raises(SlabNotShared, match="prefill finds none"):
        refusals.check("life-1")
    clock.advance_s(1)
    assert not is_held_back(refusals)


def test_another_life_of_the_peer_is_tried_at_once() -> None:
    """It may have another directory or other limits; a refusal of its own begins anew."""
    clock = ManualClock(7)
    refusals = SlabRefusals(clock)
    refusals.note("life-1", REFUSAL)
    refusals.note("life-1", REFUSAL)
    assert not is_held_back(refusals, "life-2")

    refusals.note("life-2", REFUSAL)

    clock.advance_s(5)
    assert not is_held_back(refusals, "life-2")


def test_a_session_that_ended_otherwise_takes_the_refusal_back() -> None:
    """It had its slab."""
    refusals = SlabRefusals(ManualClock(7))
    refusals.note("life-1", REFUSAL)

    refusals.note("life-1", PeerLost("the stream broke"))

    assert not is_held_back(refusals)
