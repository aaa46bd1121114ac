"""No order of arrivals, cancels, returns and lost sessions deadlocks admission or leaks from it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import PeerLost, PromptTooLong, QueueFull
from decode_service.cache.reservation import Holder
from tests.support.admissions import Request, Slots, make_desk

LOST = PeerLost("the stream broke")
NUM_PAGES = (6, 9)
SLAB_BYTES = 512


def overtaken(request: Request, waiting: list[Request]) -> list[Request]:
    """Return who waits for something that a later request must not take before them."""
    return [one for one in waiting if one.slots is None or one.slots is request.slots]


class AdmissionLife(RuleBasedStateMachine):
    """Requests of every size, local or over one of two sessions, against plain lists."""

    @initialize()
    def open(self) -> None:
        """Begin with an idle desk and two sessions."""
        self.desk = make_desk(num_pages=NUM_PAGES, num_lanes=3, queue_limit=4, slab_bytes=SLAB_BYTES)
        self.sessions = [self.desk.slots, Slots(SLAB_BYTES)]
        self.offered: list[Request] = []
        self.withdrawn: list[Request] = []
        self.live: list[Request] = []

    @rule(
        prompt_len=st.integers(1, 38),
        max_new_tokens=st.integers(1, 9),
        slot_bytes=st.integers(1, SLAB_BYTES),
        session=st.sampled_from([None, 0, 1]),
        drops_at_once=st.booleans(),
    )
    def offer(
        self, prompt_len: int, max_new_tokens: int, slot_bytes: int, session: int | None, drops_at_once: bool
    ) -> None:
        """A request is granted, queued, or refused for a reason that holds."""
        waiting = self.waiting()
        try:
            request = self.desk.offer(
                prompt_len=prompt_len,
                max_new_tokens=max_new_tokens,
                slot_bytes=None if session is None else slot_bytes,
                slots=None if session is None else self.sessions[session],
                drops_at_once=drops_at_once,
            )
        except PromptTooLong:
            assert prompt_len + max_new_tokens - 1 > 4 * NUM_PAGES[1]
            return
        except QueueFull:
            assert len(waiting) == 4
            return
        assert not (request.is_granted and overtaken(request, waiting)), "overtook who was waiting"
        self.offered.append(request)
        self.note_grants()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A live request ends."""
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        request.leave()
        self.note_grants()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def linger(self, data: st.DataObject) -> None:
        """A client leaves while the producer still writes; lane and pages stay until it has ended."""
        request = data.draw(st.sampled_from(self.live))
        used = self.desk.admission.statistics().lanes_used
        request.reservation.hold(Holder.PRODUCER)
        request.reservation.drop(Holder.CLIENT)
        assert self.desk.admission.statistics().lanes_used == used
        request.reservation.hold(Holder.CLIENT)
        request.reservation.drop(Holder.PRODUCER)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A waiting request is cancelled."""
        request = data.draw(st.sampled_from(self.waiting()))
        self.withdrawn.append(request)
        self.desk.admission.withdraw(request.ticket)
        assert not request.is_granted
        self.note_grants()

    @rule(session=st.sampled_from([0, 1]))
    def lose(self, session: int) -> None:
        """A session ends: who waits for it fails, and a new one takes its place."""
        lost = self.sessions[session]
        waiting = [request for request in self.waiting() if request.slots is lost]
        self.desk.admission.fail_waiting(lost, LOST)
        assert all(request.error is LOST for request in waiting)
        self.sessions[session] = Slots(SLAB_BYTES)
        self.note_grants()

    @invariant()
    def nothing_is_lost(self) -> None:
        """Grants follow arrivals, and what is held is exactly what the live requests hold."""
        self.desk.admission.check_integrity()
        statistics = self.desk.admission.statistics()
        assert statistics.lanes_used == len(self.live)
        assert statistics.num_queued == len(self.waiting())
        for source in (None, *self.sessions):
            granted = [request for request in self.offered if request.is_granted and request.slots is source]
            found = [request for request in self.desk.granted if request.slots is source]
            assert granted == found, "the order of grants is not that of arrivals"

    def waiting(self) -> list[Request]:
        """Return who is neither granted nor failed nor withdrawn, in order of arrival."""
        return [
            request
            for request in self.offered
            if not request.is_granted and request.error is None and request not in self.withdrawn
        ]

    def note_grants(self) -> None:
        """List who holds something now."""
        self.live = [request for request in self.desk.granted if request.reservation.holders]

    def teardown(self) -> None:
        """When whoever is granted leaves, everybody is served and nothing stays held."""
        if not hasattr(self, "desk"):
            return
        while self.live:
            self.live[0].leave()
            self.note_grants()
        assert not self.waiting(), "deadlock"
        self.desk.assert_idle()
        assert all(slots.num_leased == 0 for slots in self.sessions)


AdmissionLife.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestAdmissionLife = AdmissionLife.TestCase


def test_three_requests_finish_when_the_cache_holds_one_and_a_half() -> None:
    """Reserve all or wait: no circle of requests that each hold half (C1)."""
    desk = make_desk(num_pages=(30, 9))
    requests = [desk.offer(prompt_len=20, max_new_tokens=5) for _ in range(3)]

    for request in requests:
        assert request.grant is not None
        request.leave()

    desk.assert_idle()
    with pytest.raises(PromptTooLong):
        desk.offer(prompt_len=37, max_new_tokens=1)
