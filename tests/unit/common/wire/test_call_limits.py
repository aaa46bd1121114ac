"""Tests of `common/wire/call_limits.py`."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

import pytest

from common.errors import CallsExhausted
from common.wire.call_limits import DEFAULT_LIMIT, PATIENCE_S, CallLimits
from tests.support.clock import ManualClock

GENERATE, CHECK = "/a.Service/Generate", "/b.Health/Check"


def test_a_call_is_open_while_its_context_lasts() -> None:
    """And leaves its number free, also by an error."""
    limits = CallLimits({GENERATE: 1})

    with pytest.raises(KeyError), limits.open(GENERATE):
        raise KeyError

    with limits.open(GENERATE), pytest.raises(CallsExhausted):
        limits.open(GENERATE).__enter__()


def test_a_call_is_refused_when_all_of_its_method_are_open() -> None:
    """Nothing was counted for it, so the next one finds what it left."""
    limits = CallLimits({GENERATE: 2})
    for _ in range(2):
        refused = pytest.raises(CallsExhausted, match="1 of 2 open calls of /a")
        with limits.open(GENERATE), limits.open(GENERATE), refused:
            limits.open(GENERATE).__enter__()


def test_methods_do_not_share_their_limits() -> None:
    """Health answers while every request of the service is taken."""
    limits = CallLimits({GENERATE: 1})
    with limits.open(GENERATE), limits.open(CHECK):
        assert limits.limit_of(CHECK) == DEFAULT_LIMIT


@pytest.mark.parametrize(("silent_s", "has_made_room"), [(PATIENCE_S / 2, False), (PATIENCE_S, True)])
def test_a_call_that_sends_nothing_makes_room_once_it_had_its_time(
    silent_s: float, has_made_room: bool
) -> None:
    """The other one is counted in its place; before that time its request may be on its way."""
    clock, ended = ManualClock(), list[str]()
    limits = CallLimits({GENERATE: 2}, clock)
    with limits.open(GENERATE) as first, limits.open(GENERATE) as second, ExitStack() as later:
        later.enter_context(limits.silence(second, lambda: ended.append("second")))
        later.enter_context(limits.silence(first, lambda: ended.append("first")))
        clock.advance_s(silent_s)
        with nullcontext() if has_made_room else pytest.raises(CallsExhausted):
            later.enter_context(limits.open(GENERATE))

        assert ended == (["second"] if has_made_room else [])

    with limits.open(GENERATE), limits.open(GENERATE):
        pass


def test_a_call_that_has_sent_its_request_never_makes_room() -> None:
    """What was accepted is answered."""
    clock = ManualClock()
    limits = CallLimits({GENERATE: 1}, clock)
    with limits.open(GENERATE) as call:
        with limits.silence(call, lambda: None):
            clock.advance_s(PATIENCE_S)

        with pytest.raises(CallsExhausted):
            limits.open(GENERATE).__enter__()


def test_refusals_are_counted_until_the_method_is_half_empty() -> None:
    """One that hovers at its limit is in one row of refusals, which is told once."""
    limits, counts = CallLimits({GENERATE: 4}), []

    def refuse() -> None:
        with pytest.raises(CallsExhausted):
            limits.open(GENERATE).__enter__()
        counts.append(limits.num_refused(GENERATE))

    with ExitStack() as half:
        for _ in range(2):
            half.enter_context(limits.open(GENERATE))
        with limits.open(GENERATE), limits.open(GENERATE):
            refuse()
            refuse()
        with limits.open(GENERATE), limits.open(GENERATE):
            refuse()

    assert counts == [1, 2, 1]
