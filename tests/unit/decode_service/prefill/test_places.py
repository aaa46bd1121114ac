"""Which place is chosen for a prompt, and what it waits for when none takes it now."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from common.errors import InvalidRequest, PromptTooLong, Violation
from common.session.messages import TransferMode
from decode_service.cache.admission import Choice, Wish
from decode_service.prefill.costs import CostModel
from decode_service.prefill.places import Place, choose, nearest
from decode_service.request import Route
from tests.support.admissions import FakePlace, fill, make_local, make_stages


def chosen(
    places: list[FakePlace],
    prompt_len: int = 3,
    *,
    avoided: tuple[FakePlace, ...] = (),
    ahead: Mapping[Place, int] | None = None,
    costs: CostModel | None = None,
) -> Choice[Place]:
    """Choose among places that could all take the prompt."""
    wish = Wish(Route.AUTO, TransferMode.STREAM, frozenset(avoided))
    return choose(places, prompt_len, wish, ahead or {}, costs or CostModel())


def measured(**token_s: float) -> CostModel:
    """Return the costs of a token at each place by its name."""
    costs = CostModel()
    for name, seconds in token_s.items():
        costs.observe(name, 10, make_stages(10 * seconds))
    return costs


def test_the_place_with_the_fewest_prompts_is_chosen() -> None:
    """A slow one is given fewer, since what it has ends later."""
    slow, fast = FakePlace("slow"), FakePlace("fast")
    fill(slow, 2)
    fill(fast, 1)

    assert chosen([slow, fast]).place is fast


def test_a_place_that_cannot_take_it_now_is_passed_over() -> None:
    """However few prompts it has."""
    full, busy = FakePlace("full", max_running=1), FakePlace("busy")
    fill(full, 1)
    fill(busy, 5)

    assert chosen([full, busy]).place is busy


def test_a_place_that_others_wait_for_is_passed_over() -> None:
    """They came before."""
    wanted, other = FakePlace("wanted"), FakePlace("other")

    assert chosen([wanted, other], ahead={wanted: 7}).place is other


def test_a_prompt_waits_for_every_place_that_could_take_it() -> None:
    """Which of them has room first is not known."""
    places = [FakePlace("first", max_running=0), FakePlace("second", max_running=0)]

    choice = chosen(places)

    assert choice.place is None
    assert choice.waits_for == tuple(places)


def test_a_place_where_it_was_lost_is_avoided() -> None:
    """Though it is idle and the other one busy; when that has no room, the prompt waits for it."""
    lost, other = FakePlace("lost"), FakePlace("other", max_running=1)
    assert chosen([lost, other], avoided=(lost,)).place is other
    fill(other, 1)

    assert chosen([lost, other], avoided=(lost,)).waits_for == (other,)


def test_a_place_where_it_was_lost_is_chosen_for_want_of_another() -> None:
    """It may do better the next time."""
    lost = FakePlace("lost")

    assert chosen([lost], avoided=(lost,)).place is lost


def test_this_process_is_another_place_when_it_was_lost_at_the_only_peer() -> None:
    """Before any cost is looked at."""
    lost, local = FakePlace("lost"), make_local()

    assert chosen([lost, local], avoided=(lost,)).place is local


def test_the_cheaper_route_is_chosen_with_its_estimates() -> None:
    """Own tokens and what is queued before them, at the price of each route."""
    peer, local = FakePlace("peer"), make_local()
    fill(peer, 1, prompt_len=5)

    choice = chosen([peer, local], 3, costs=measured(peer=1.0, local=0.9))

    assert choice.place is local
    assert choice.estimates == {Route.REMOTE: pytest.approx(8.0), Route.LOCAL: pytest.approx(2.7)}


@pytest.mark.parametrize(
    ("idle_s", "expected", "estimate_s"),
    [(1.0, "idle", 3.0), (2.0, "local", 6.0)],
    ids=["as fast as the other", "slower"],
)
def test_the_cost_of_a_route_is_that_of_the_peer_it_would_go_to(
    idle_s: float, expected: str, estimate_s: float
) -> None:
    """The other one is fast, but has a long backlog and would not get the prompt."""
    busy, idle, local = FakePlace("busy"), FakePlace("idle"), make_local()
    fill(busy, 1, prompt_len=50)

    choice = chosen([busy, idle, local], costs=measured(busy=0.01, idle=idle_s, local=0.9))

    assert choice.place is not None
    assert choice.place.name == expected
    assert choice.estimates[Route.REMOTE] == pytest.approx(estimate_s)


@pytest.mark.parametrize(
    ("costs", "estimate_s"),
    [({"slow": 2.0, "fast": 0.5}, 5.0), ({"fast": 0.5}, None)],
    ids=["both were measured", "one was never tried"],
)
def test_a_route_without_a_place_now_costs_what_the_first_one_done_with_it_does(
    costs: dict[str, float], estimate_s: float | None
) -> None:
    """A prompt that waits is bound to no peer."""
    slow, fast = FakePlace("slow", max_running=1), FakePlace("fast", max_running=1)
    fill(slow, 1, prompt_len=3)
    fill(fast, 1, prompt_len=7)

    choice = chosen([slow, fast, make_local()], costs=measured(local=9.0, **costs))

    assert (choice.place, choice.waits_for) == (None, (slow, fast))
    assert choice.estimates[Route.REMOTE] == estimate_s


def test_those_who_wait_for_a_place_are_part_of_its_backlog() -> None:
    """With a queue before the peer, this process may be sooner."""
    peer, local = FakePlace("peer", max_running=0), make_local()
    costs = measured(peer=1.0, local=0.9)
    assert chosen([peer, local], costs=costs).waits_for == (peer,)

    assert chosen([peer, local], ahead={peer: 9}, costs=costs).place is local


def test_the_cheaper_route_is_waited_for() -> None:
    """A busy peer may still be sooner than this process."""
    peer, local = FakePlace("peer", max_running=1), make_local()
    fill(peer, 1)

    assert chosen([peer, local], costs=measured(peer=0.1, local=1.0)).waits_for == (peer,)


def test_no_costs_are_compared_where_there_is_no_choice_of_route() -> None:
    """And none are logged."""
    assert chosen([FakePlace("first"), FakePlace("second")]).estimates == {}


def test_the_nearest_refusal_is_that_of_the_place_that_lacks_least() -> None:
    """Also where one counts tokens and the other bytes."""
    tokens = PromptTooLong("prompt tokens", 41, 40)
    slab = PromptTooLong("slab bytes", 9000, 4096)

    assert nearest([slab, tokens]) is tokens


def test_a_refusal_of_the_kind_is_told_only_where_none_is_of_the_size() -> None:
    """A smaller prompt is what most clients can send."""
    mode = InvalidRequest([Violation("transfer", "is stream, the prefill service takes whole")])
    tokens = PromptTooLong("prompt tokens", 4100, 40)

    assert nearest([mode, tokens]) is tokens
    assert nearest([mode]) is mode
