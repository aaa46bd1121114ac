"""Which places are asked for a prompt, and what a client hears whose prompt none of them takes."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import KVSpanError, PeerUnavailable, PromptTooLong
from common.session.messages import TransferMode
from decode_service.cache.admission import Choice, Wish
from decode_service.prefill.places import Place
from decode_service.prefill.routing import LocalUse, Router
from decode_service.request import Route
from tests.support.admissions import FakePeer, FakePlace, make_local


def ask(router: Router, prompt_len: int, route: Route) -> Choice[Place]:
    """Ask for a place for a prompt that is the first in the queue."""
    return router.choose(prompt_len, Wish(route, TransferMode.STREAM), {})


def name_of(choice: Choice[Place]) -> str:
    """Return the name of the place that takes it now."""
    assert choice.place is not None
    return choice.place.name


def make_router(*places: FakePlace | None, longest_local: int = 100) -> Router:
    """Return a router with a prefill service for each place, of which those without one are down."""
    return Router(make_local(longest_local), tuple(FakePeer(place) for place in places))


@pytest.mark.parametrize(
    ("route", "expected"), [(Route.REMOTE, "peer"), (Route.LOCAL, "local"), (Route.AUTO, "peer")]
)
def test_a_wish_for_a_route_is_obeyed(route: Route, expected: str) -> None:
    """`auto` prefers the prefill service while nothing was measured."""
    assert name_of(ask(make_router(FakePlace("peer")), 3, route)) == expected


def test_auto_looks_at_limits_before_cost() -> None:
    """What the prefill service can never do this process does."""
    router = make_router(FakePlace("peer", max_prompt_tokens=40))

    assert name_of(ask(router, 40, Route.AUTO)) == "peer"
    assert name_of(ask(router, 41, Route.AUTO)) == "local"


def test_what_one_prefill_service_can_never_do_another_one_does() -> None:
    """By whichever limit."""
    router = make_router(FakePlace("short", max_prompt_tokens=40), FakePlace("large", num_tokens=50))

    assert name_of(ask(router, 45, Route.REMOTE)) == "large"


def test_auto_uses_this_process_while_all_prefill_services_are_down() -> None:
    """A prompt is computed wherever it can be."""
    assert name_of(ask(make_router(None, None), 3, Route.AUTO)) == "local"


def test_remote_fails_with_the_problems_while_all_prefill_services_are_down() -> None:
    """At once, and so that the client may try again."""
    with pytest.raises(PeerUnavailable, match="SHUTTING_DOWN") as refusal:
        ask(make_router(None, None), 3, Route.REMOTE)

    assert refusal.value.cause == "SHUTTING_DOWN"


@pytest.mark.parametrize("route", [Route.REMOTE, Route.AUTO])
def test_a_prompt_waits_for_a_session_that_is_opened_beside_one_that_was_passed(route: Route) -> None:
    """It fails for no session that it never used; whatever is known of other places."""
    peer = FakePeer(None)
    peer.is_reopening = True
    router = Router(make_local(5), (FakePeer(FakePlace("short", max_prompt_tokens=5)), peer))

    assert ask(router, 9, route) == Choice(None)


def test_a_local_prompt_waits_for_no_session() -> None:
    """None could take it."""
    peer = FakePeer(None)
    peer.is_reopening = True

    with pytest.raises(PromptTooLong):
        ask(Router(make_local(5), (peer,)), 9, Route.LOCAL)


def test_remote_waits_while_all_prefill_services_are_busy() -> None:
    """Busy is no failure."""
    busy = FakePlace("busy", max_running=0)

    assert ask(make_router(busy, None), 3, Route.REMOTE).waits_for == (busy,)


@pytest.mark.parametrize("route", [Route.REMOTE, Route.AUTO])
def test_what_no_place_could_ever_take_is_refused_with_the_numbers_of_the_best(route: Route) -> None:
    """Waiting would not help."""
    places = FakePlace("short", max_prompt_tokens=20), FakePlace("large", num_tokens=50)

    with pytest.raises(PromptTooLong) as refusal:
        ask(make_router(*places, longest_local=30), 60, route)

    found = (refusal.value.limit_name, refusal.value.needed, refusal.value.limit)
    assert found == ("slab bytes", 60 * 64, 50 * 64)


def test_a_local_prompt_hears_of_no_prefill_service() -> None:
    """Neither of their limits nor of their problems."""
    with pytest.raises(PromptTooLong) as refusal:
        ask(make_router(FakePlace("peer"), None, longest_local=30), 31, Route.LOCAL)

    assert refusal.value.limit == 30


def test_a_prompt_may_be_for_the_prefill_service_that_is_down() -> None:
    """It is not known that it can never fit: the client may try again, and hears both."""
    router = make_router(FakePlace("short", max_prompt_tokens=40), None)

    with pytest.raises(PeerUnavailable) as refusal:
        ask(router, 41, Route.REMOTE)

    assert "SHUTTING_DOWN" in str(refusal.value)
    assert "needs 41 of prompt tokens, the limit is 40" in str(refusal.value)


async def test_who_waits_for_a_place_goes_on_once_one_is_there_that_could_take_the_prompt() -> None:
    """A session that could not does not wake it for good."""
    peer = FakePeer(None)
    router = Router(make_local(), (peer,))
    wish = Wish(Route.REMOTE, TransferMode.STREAM)
    waiting = asyncio.create_task(router.wait_for_place(9, wish, limit_s=60))
    for place in (FakePlace("short", max_prompt_tokens=5), FakePlace("large")):
        await asyncio.sleep(0)
        assert not waiting.done()
        peer.join(place)
        router.note_change()

    await waiting


async def test_who_waits_for_a_place_goes_on_when_the_limit_passes() -> None:
    """Without an error: whoever asks next hears why there is none."""
    await make_router(None).wait_for_place(9, Wish(Route.REMOTE, TransferMode.STREAM), limit_s=0)


@pytest.mark.parametrize(("use", "expected"), [(LocalUse.FREE, "local"), (LocalUse.LAST, "local")])
def test_this_process_may_be_the_last_resort(use: LocalUse, expected: str) -> None:
    """A prompt that no session takes is computed here, if the operator prefers that to no answer."""
    router = Router(make_local(100), (FakePeer(FakePlace("peer", max_prompt_tokens=40)),), use)

    assert name_of(ask(router, 41, Route.AUTO)) == expected


def test_the_last_resort_is_no_choice() -> None:
    """However cheap this process is: what a session could take waits for it."""
    local, peer = make_local(100), FakePlace("peer", max_running=0)
    router = Router(local, (FakePeer(peer),), LocalUse.LAST)

    choice = ask(router, 5, Route.AUTO)

    assert (choice.place, choice.waits_for) == (None, (peer,))


@pytest.mark.parametrize("place", [None, FakePlace("peer", max_prompt_tokens=4)])
def test_a_process_with_other_numerics_is_no_resort_at_all(place: FakePlace | None) -> None:
    """Only who asks for it gets its tokens; all others hear why there is none."""
    router = Router(make_local(100), (FakePeer(place),), LocalUse.NONE)

    with pytest.raises(KVSpanError) as refused:
        ask(router, 5, Route.AUTO)

    assert refused.value.code in ("PREFILL_UNAVAILABLE", "REQUEST_CAN_NEVER_FIT")
    assert name_of(ask(router, 5, Route.LOCAL)) == "local"


def test_a_process_without_an_engine_is_no_place() -> None:
    """Every prompt goes to a session."""
    router = Router(None, (FakePeer(FakePlace("peer")),))

    assert name_of(ask(router, 5, Route.AUTO)) == "peer"
