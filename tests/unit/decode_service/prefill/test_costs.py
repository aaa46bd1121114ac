"""Tests of `decode_service/prefill/costs.py`."""

from __future__ import annotations

import pytest

from common.telemetry.timeline import Stages
from decode_service.prefill.costs import LOCAL_MARGIN, WEIGHT, CostModel
from decode_service.request import Route


def make_stages(prefill_s: float, exposed_s: float) -> Stages:
    """Return stages in which only prefill and exposed transfer took time."""
    prefill, exposed = round(prefill_s * 1e9), round(exposed_s * 1e9)
    return Stages(0, 0, prefill, exposed, 0, 0, prefill + exposed)


def test_remote_is_chosen_when_nothing_was_measured() -> None:
    """The pair exists to compute prompts in the prefill service."""
    choice = CostModel().choose(7, remote_backlog=900, local_backlog=0)

    assert (choice.route, choice.remote_s, choice.local_s) == (Route.REMOTE, None, None)


def test_remote_is_chosen_when_only_it_was_measured() -> None:
    """A route nobody has tried has no estimate to win with."""
    model = CostModel()
    model.observe(Route.REMOTE, 10, make_stages(5.0, 1.0))

    choice = model.choose(4, remote_backlog=6, local_backlog=0)

    assert choice.route is Route.REMOTE
    assert choice.remote_s == pytest.approx(1.0 + (4 + 6) * 0.5)


@pytest.mark.parametrize(("local_token_s", "expected"), [(0.19, Route.LOCAL), (0.21, Route.REMOTE)])
def test_local_is_chosen_when_it_is_cheaper_by_the_margin(local_token_s: float, expected: Route) -> None:
    """Local work takes cores from the lanes, so being a little cheaper is not enough."""
    model = CostModel()
    model.observe(Route.REMOTE, 10, make_stages(4.0, 0.0))
    model.observe(Route.LOCAL, 10, make_stages(10 * local_token_s, 0.0))

    choice = model.choose(20, remote_backlog=0, local_backlog=0)

    assert LOCAL_MARGIN == 0.5
    assert choice.route is expected


def test_local_is_chosen_when_the_prefill_service_has_a_backlog() -> None:
    """Tokens queued before a prompt are part of its cost."""
    model = CostModel()
    for route in (Route.REMOTE, Route.LOCAL):
        model.observe(route, 10, make_stages(1.0, 0.0))

    assert model.choose(10, remote_backlog=0, local_backlog=0).route is Route.REMOTE
    assert model.choose(10, remote_backlog=11, local_backlog=0).route is Route.LOCAL
    assert model.choose(10, remote_backlog=11, local_backlog=11).route is Route.REMOTE


def test_averages_move_with_new_samples() -> None:
    """A service that becomes faster is believed after some prompts, not at once."""
    model = CostModel()
    model.observe(Route.REMOTE, 10, make_stages(10.0, 2.0))
    model.observe(Route.REMOTE, 10, make_stages(0.0, 0.0))

    choice = model.choose(1, remote_backlog=0, local_backlog=0)

    assert choice.remote_s == pytest.approx((1 - WEIGHT) * (2.0 + 1.0))
