"""Every arm is in every round, and none always follows the same one."""

from __future__ import annotations

from kvspan.bench.arms import ARMS, STREAM, STREAM_AGAIN, in_order


def test_every_round_has_every_arm_once() -> None:
    """A slow minute of the machine meets all arms alike."""
    assert all(sorted(in_order("abcde", index)) == list("abcde") for index in range(-2, 7))


def test_order_turns_and_moves_on() -> None:
    """Odd rounds run backwards; after two rounds another arm begins."""
    assert ["".join(in_order("abc", index)) for index in range(4)] == ["abc", "cba", "bca", "acb"]


def test_control_is_the_same_request_under_another_name() -> None:
    """The A/A control differs from its arm in nothing that a service can see."""
    assert (STREAM.route, STREAM.transfer) == (STREAM_AGAIN.route, STREAM_AGAIN.transfer)
    assert len({arm.name for arm in ARMS}) == len(ARMS)
