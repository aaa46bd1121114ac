"""Tests of `common/wire/call_limits.py`."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from common.errors import CallsExhausted
from common.wire.call_limits import DEFAULT_LIMIT, CallLimits

GENERATE, CHECK = "/a.Service/Generate", "/b.Health/Check"


def test_a_call_is_open_while_its_context_lasts() -> None:
    """And leaves its number free, also by an error."""
    limits = CallLimits({GENERATE: 3})

    with pytest.raises(KeyError), limits.open(GENERATE):
        assert limits.num_open(GENERATE) == 1
        raise KeyError

    assert limits.num_open(GENERATE) == 0


def test_a_call_is_refused_when_all_of_its_method_are_open() -> None:
    """Nothing was counted for it, so the next one finds what it left."""
    limits = CallLimits({GENERATE: 2})
    with limits.open(GENERATE), limits.open(GENERATE):
        with pytest.raises(CallsExhausted, match="1 of 2 open calls of /a"):
            limits.open(GENERATE).__enter__()

        assert limits.num_open(GENERATE) == 2

    with limits.open(GENERATE):
        assert limits.num_open(GENERATE) == 1


def test_methods_do_not_share_their_limits() -> None:
    """Health answers while every request of the service is taken."""
    limits = CallLimits({GENERATE: 1})
    with limits.open(GENERATE), limits.open(CHECK):
        assert limits.limit_of(CHECK) == DEFAULT_LIMIT


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
