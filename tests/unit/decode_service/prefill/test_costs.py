"""Tests of `decode_service/prefill/costs.py`."""

from __future__ import annotations

import pytest

from decode_service.prefill.costs import LOCAL_MARGIN, WEIGHT, CostModel, cheaper
from decode_service.request import Route
from tests.support.admissions import make_stages


def estimates(model: CostModel, remote_tokens: int, local_tokens: int) -> dict[Route, float | None]:
    """Return the estimates for so many tokens up to the end of a prompt on each route."""
    return {
        Route.REMOTE: model.estimate_s("peer", remote_tokens),
        Route.LOCAL: model.estimate_s("local", local_tokens),
    }


def chosen(model: CostModel, remote_tokens: int, local_tokens: int) -> Route:
    """Return the cheaper route for so many tokens up to the end of a prompt on each."""
    return cheaper(estimates(model, remote_tokens, local_tokens))


def test_remote_is_chosen_when_nothing_was_measured() -> None:
    """The pair exists to compute prompts in the prefill service."""
    assert estimates(CostModel(), 907, 7) == {Route.REMOTE: None, Route.LOCAL: None}
    assert chosen(CostModel(), 907, 7) is Route.REMOTE


def test_remote_is_chosen_when_only_it_was_measured() -> None:
    """A place nobody has tried has no estimate to win with."""
    model = CostModel()
    model.observe("peer", 10, make_stages(5.0, 1.0))

    assert estimates(model, 10, 4) == {Route.REMOTE: pytest.approx(1.0 + 10 * 0.5), Route.LOCAL: None}
    assert chosen(model, 10, 4) is Route.REMOTE


@pytest.mark.parametrize(("local_token_s", "expected"), [(0.19, Route.LOCAL), (0.21, Route.REMOTE)])
def test_local_is_chosen_when_it_is_cheaper_by_the_margin(local_token_s: float, expected: Route) -> None:
    """Local work takes cores from the lanes, so being a little cheaper is not enough."""
    model = CostModel()
    model.observe("peer", 10, make_stages(4.0))
    model.observe("local", 10, make_stages(10 * local_token_s))

    assert LOCAL_MARGIN == 0.5
    assert chosen(model, 20, 20) is expected


def test_local_is_chosen_when_the_prefill_service_has_a_backlog() -> None:
    """Tokens queued before a prompt are part of its cost."""
    model = CostModel()
    for place in ("peer", "local"):
        model.observe(place, 10, make_stages(1.0))

    assert chosen(model, 10, 10) is Route.REMOTE
    assert chosen(model, 21, 10) is Route.LOCAL
    assert chosen(model, 21, 21) is Route.REMOTE


def test_averages_move_with_new_samples() -> None:
    """A service that becomes faster is believed after some prompts, not at once."""
    model = CostModel()
    model.observe("peer", 10, make_stages(10.0, 2.0))
    model.observe("peer", 10, make_stages(0.0))

    assert model.estimate_s("peer", 1) == pytest.approx((1 - WEIGHT) * (2.0 + 1.0))
