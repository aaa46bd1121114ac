"""No order of arrivals, cancels, returns and of places that come and go deadlocks admission or leaks from it.

The naive model knows who was offered in which order, and asks of every place what it has. From that alone it
tells who may be waiting, who may have failed, and whom nobody may have overtaken.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import PeerUnavailable, PromptTooLong, QueueFull
from decode_service.cache.reservation import Holder
from decode_service.request import Route
from tests.support.admissions import Desk, FakePlace, Offer, make_desk, make_local, make_stages

NUM_PAGES = (12, 15)
NUM_LANES = 4
QUEUE_LIMIT = 5
LONGEST_LOCAL = 30

PLACES = st.builds(
    FakePlace,
    st.just("peer"),
    num_tokens=st.sampled_from([9, 14, 40]),
    max_prompt_tokens=st.sampled_from([8, 40]),
    max_running=st.sampled_from([1, 3]),
)
"""A session with one prefill service or another."""

WISHES = st.tuples(
    st.one_of(st.integers(1, 9), st.integers(1, 42)),
    st.sampled_from([Route.REMOTE, Route.REMOTE, Route.AUTO, Route.LOCAL]),
    st.sampled_from([None, None, 0, 1]),
    st.sampled_from([False, False, False, True]),
)
"""Tokens, a route, the prefill service to avoid, and whether it was granted before."""


def could_ever(desk: Desk, offer: Offer) -> list[FakePlace]:
    """Return the places that could take a request if they were idle."""
    route, prompt_len = offer.ticket.wish.route, offer.ticket.prompt_len
    sessions = [peer.place for peer in desk.peers if peer.place] if route is not Route.LOCAL else []
    local = [desk.local] if route is not Route.REMOTE else []
    return [
        place for place in (*sessions, *local) if place.refusal(prompt_len, offer.ticket.wish.mode) is None
    ]


def candidates(desk: Desk, offer: Offer) -> list[FakePlace]:
    """Return the places that a request may wait for or go to."""
    able = could_ever(desk, offer)
    return [place for place in able if place not in offer.ticket.wish.avoided] or able


def can_now(place: FakePlace, offer: Offer) -> bool:
    """Tell whether a place has room for a request."""
    return place.can_take(place.slot_bytes(offer.ticket.prompt_len, offer.ticket.wish.mode))


class AdmissionLife(RuleBasedStateMachine):
    """Requests of every size and wish, prefill services that come, leave and die, and this process."""

    @initialize(places=st.lists(PLACES, min_size=2, max_size=2))
    def open(self, places: list[FakePlace]) -> None:
        """Begin with an idle desk."""
        local = make_local(LONGEST_LOCAL)
        self.desk = make_desk(
            *places, num_pages=NUM_PAGES, num_lanes=NUM_LANES, queue_limit=QUEUE_LIMIT, local=local
        )
        self.offered: list[Offer] = []
        self.withdrawn: list[Offer] = []
        self.lost: list[Offer] = []
        self.num_seen = 0
        self.failed: list[Offer] = []

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=5))
    def offer(self, wishes: list[tuple[int, Route, int | None, bool]]) -> None:
        """Requests come one by one: nobody was overtaken by what was granted before he came."""
        for wish in wishes:
            self.offer_one(*wish)
            self.nobody_is_overtaken()

    def offer_one(self, prompt_len: int, route: Route, avoids: int | None, is_first: bool) -> None:
        """A request is granted, queued, or refused for a reason that holds."""
        num_waiting = len(self.waiting())
        place = None if avoids is None else self.desk.peers[avoids].place
        try:
            offer = self.desk.offer(
                prompt_len,
                route=route,
                avoided=(place,) if place else (),
                is_first=is_first,
            )
        except PromptTooLong:
            assert prompt_len > 8
        except PeerUnavailable:
            assert any(peer.place is None for peer in self.desk.peers)
            assert route is not Route.LOCAL
        except QueueFull:
            assert num_waiting >= QUEUE_LIMIT
            assert not is_first
        else:
            self.offered.append(offer)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request that was granted ends."""
        data.draw(st.sampled_from(self.live())).leave()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def linger(self, data: st.DataObject) -> None:
        """A client leaves while the producer still writes; lane and pages stay until it has ended."""
        offer = data.draw(st.sampled_from(self.live()))
        used = self.desk.admission.statistics().lanes_used
        offer.reservation.hold(Holder.PRODUCER)
        offer.reservation.drop(Holder.CLIENT)
        assert self.desk.admission.statistics().lanes_used == used
        offer.reservation.hold(Holder.CLIENT)
        offer.reservation.drop(Holder.PRODUCER)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A waiting request is cancelled."""
        offer = data.draw(st.sampled_from(self.waiting()))
        self.withdrawn.append(offer)
        self.desk.admission.withdraw(offer.ticket)

    @rule(number=st.sampled_from([0, 1]))
    def leave(self, number: int) -> None:
        """A prefill service takes nothing more, and ends what it has."""
        if self.desk.peers[number].place:
            self.desk.leave(number)

    @rule(number=st.sampled_from([0, 1]))
    def die(self, number: int) -> None:
        """A prefill service is lost, with exactly what it was working on."""
        place = self.desk.peers[number].place
        self.desk.join(number, None)
        for offer in self.live():
            if offer.grant is not None and offer.grant.place is place:
                offer.leave()

    @rule(number=st.sampled_from([0, 1]), place=PLACES)
    def come(self, number: int, place: FakePlace) -> None:
        """A prefill service has a new session, with other limits than before."""
        if self.desk.peers[number].place is None:
            self.desk.join(number, place)

    @rule(place=st.sampled_from(["peer", "local"]), seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def measure(self, place: str, seconds: float) -> None:
        """A prompt was cheap or dear, so that `auto` may choose otherwise."""
        self.desk.measure(place, make_stages(seconds))

    @invariant()
    def nothing_is_held_while_waiting(self) -> None:
        """What is held is exactly what the live requests hold."""
        self.desk.admission.check_integrity()
        statistics, live = self.desk.admission.statistics(), self.live()
        assert (statistics.lanes_used, statistics.num_queued) == (len(live), len(self.waiting()))
        places = [self.desk.local, *(peer.place for peer in self.desk.peers if peer.place)]
        for place in places:
            here = [offer for offer in live if offer.grant and offer.grant.place is place]
            assert place.num_running == len(here)

    @invariant()
    def nobody_fails_for_a_peer_it_never_used(self) -> None:
        """Whoever failed while it waited could go nowhere."""
        failed = [offer for offer in self.offered if offer.error]
        for offer in failed:
            if offer not in self.failed:
                assert not could_ever(self.desk, offer)
                assert isinstance(offer.error, PeerUnavailable | PromptTooLong)
        self.failed = failed

    @invariant()
    def nobody_waits_who_could_go(self) -> None:
        """A request waits for pages and a lane, or for every place that it could go to."""
        wanted: set[FakePlace] = set()
        for offer in self.waiting():
            places = candidates(self.desk, offer)
            free = [place for place in places if place not in wanted and can_now(place, offer)]
            remote = [place for place in places if place is not self.desk.local]
            has_room = self.has_room(offer)
            if len(remote) in (0, len(places)) or set(remote) & set(free):
                assert not (free and has_room), "it fits and waits"
            if not has_room and free:
                return  # Perhaps it waits for pages, and then all behind it do.
            wanted.update(remote)

    @invariant()
    def nobody_is_overtaken(self) -> None:
        """Whoever waits has not seen a later one go to a place that it could go to, nor take its pages."""
        news, self.num_seen = self.desk.granted[self.num_seen :], len(self.desk.granted)
        wanted: set[FakePlace] = set()
        for waiting in self.waiting():
            later = [one for one in news if one in self.offered and self.is_before(waiting, one)]
            places = [one for one in candidates(self.desk, waiting) if one is not self.desk.local]
            assert not [one for one in later if one.grant and one.grant.place in places]
            if len(places) in (0, len(candidates(self.desk, waiting))):
                free = [place for place in places if place not in wanted and can_now(place, waiting)]
                assert not ((free or not places) and later), "overtaken for pages or a lane"
            wanted.update(places)

    def is_before(self, one: Offer, other: Offer) -> bool:
        """Tell whether a request has the earlier place in the queue."""
        return self.position(one) < self.position(other)

    def position(self, offer: Offer) -> tuple[bool, int]:
        """Return the key of the queue's order."""
        return (not offer.ticket.is_first, self.offered.index(offer))

    def waiting(self) -> list[Offer]:
        """Return who is neither granted nor failed nor withdrawn, in the order of the queue."""
        waiting = [offer for offer in self.offered if offer.is_waiting and offer not in self.withdrawn]
        return sorted(waiting, key=self.position)

    def live(self) -> list[Offer]:
        """Return who holds something now."""
        return [offer for offer in self.desk.granted if offer.reservation.holders]

    def has_room(self, offer: Offer) -> bool:
        """Tell whether there are pages and a lane."""
        ticket = offer.ticket
        has_pages = self.desk.cache.can_reserve(ticket.prompt_len, ticket.max_new_tokens)
        return len(self.live()) < NUM_LANES and has_pages

    def teardown(self) -> None:
        """When whoever is granted leaves and a place is there, everybody is served and nothing stays held."""
        if not hasattr(self, "desk"):
            return
        for number in (0, 1):
            self.desk.join(number, FakePlace())
        while self.live():
            self.live()[0].leave()
        assert not self.waiting(), "deadlock"
        self.desk.assert_idle()


AdmissionLife.TestCase.settings = settings(max_examples=50, stateful_step_count=20)
TestAdmissionLife = AdmissionLife.TestCase


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(Route)), min_size=30, max_size=30),
    st.integers(9, 20),
)
def test_nobody_starves_under_a_stream_of_others(others: list[tuple[int, Route]], prompt_len: int) -> None:
    """Once all have left that were there when it came or went elsewhere meanwhile, it is its turn."""
    desk = make_desk(FakePlace("slow", num_tokens=20), FakePlace("small", num_tokens=8), num_lanes=NUM_LANES)
    live = [desk.offer(prompt_len, route=route) for prompt_len, route in others[:NUM_LANES]]
    large = desk.offer(prompt_len)

    for count, (other_len, route) in enumerate(others[NUM_LANES:]):
        live.append(desk.offer(other_len, route=route))
        if large.is_granted:
            break
        assert count <= 2 * NUM_LANES
        next(offer for offer in desk.granted if offer.reservation.holders).leave()
        desk.admission.check_integrity()

    assert large.place == "slow"


def test_three_requests_finish_when_the_cache_holds_one_and_a_half() -> None:
    """Reserve all or wait: no circle of requests that each hold half (C1)."""
    desk = make_desk(num_pages=(30, 9))
    offers = [desk.offer(prompt_len=20, max_new_tokens=5) for _ in range(3)]

    for offer in offers:
        assert offer.is_granted
        offer.leave()

    desk.assert_idle()
    with pytest.raises(PromptTooLong):
        desk.offer(prompt_len=37, max_new_tokens=1)
