"""Whatever happens in whatever order between two honest peers, bytes stay whose they are and all ends."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import (
    Cancelled,
    EngineFailed,
    KVSpanError,
    LeaseExpired,
    PeerLost,
    PeerUnavailable,
    PrefillEngineFailed,
    PrefillFailed,
)
from common.session.decode_side import SessionState
from common.session.messages import TransferMode
from tests.support.peer_parts import PageStore, Wish
from tests.support.peers import SessionPair

PAGE_BYTES = 4_096
COPY_FAILED = EngineFailed("the copy engine was lost")
HONEST_OUTCOMES = (
    Cancelled,
    PeerLost,
    PeerUnavailable,
    PrefillEngineFailed,
    PrefillFailed,
    LeaseExpired,
    EngineFailed,
)
"""What a transfer may fail with when both sides keep the rules: never a protocol or coverage error."""


WHICH = st.sampled_from((-1, -1, -1, -2))
"""The session at hand, or sometimes the one before."""


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    """Draw a transfer; half of them skip a prefix, half of them need credit."""
    prompt_len = draw(st.integers(1, 10))
    first_token = draw(st.integers(0, prompt_len - 1))
    mode = draw(st.sampled_from(TransferMode))
    is_tight = mode is not TransferMode.DEFERRED and draw(st.booleans())
    return Wish(prompt_len, first_token, mode, is_tight)


class HonestPair(RuleBasedStateMachine):
    """Both peers keep the rules; the stream keeps order; anything may be cancelled, fail or break."""

    @initialize(wish=wishes())
    def connect(self, wish: Wish) -> None:
        """Open the first session and start a transfer."""
        self.pages = PageStore(PAGE_BYTES)
        self.pairs: list[SessionPair] = []
        self.pair = self.add_pair()
        self.pair.start(wish)

    def add_pair(self) -> SessionPair:
        """Open another session; the ones before stay, with whatever is still under way in them."""
        pair = SessionPair(f"session-{len(self.pairs)}", self.pages)
        while pair.decode.state is not SessionState.OPEN:
            assert pair.advance()
        self.pairs.append(pair)
        return pair

    @rule(wish=wishes(), steps=st.integers(0, 20))
    def start(self, wish: Wish, steps: int) -> None:
        """Start a transfer, if it fits, and let everybody go on."""
        self.pair.start(wish)
        for _ in range(steps):
            self.pair.advance()

    @rule()
    def deliver_to_prefill(self) -> None:
        """One message arrives."""
        self.pair.deliver_to_prefill()

    @rule()
    def deliver_to_decode(self) -> None:
        """One message arrives."""
        self.pair.deliver_to_decode()

    @rule(notices_stop=st.booleans(), steps=st.integers(1, 3), which=WHICH)
    def step_engine(self, notices_stop: bool, steps: int, which: int) -> None:
        """An engine works, sometimes that of a session that is over, sometimes past a stop."""
        for _ in range(steps):
            self.pairs[max(-len(self.pairs), which)].step_engine(notices_stop)

    @rule(index=st.integers(0, 5), which=WHICH)
    def begin_import(self, index: int, which: int) -> None:
        """A copy begins, sometimes out of the slab of a session that is over."""
        self.pairs[max(-len(self.pairs), which)].begin_import(index)

    @rule(index=st.integers(0, 5), which=WHICH)
    def end_import(self, index: int, which: int) -> None:
        """A copy ends well."""
        self.pairs[max(-len(self.pairs), which)].end_import(index)

    @rule(steps=st.integers(1, 30), publishes=st.booleans())
    def advance(self, steps: int, publishes: bool) -> None:
        """Everybody goes on for a while."""
        for _ in range(steps):
            self.pair.advance(publishes)

    @rule()
    def publish(self) -> None:
        """One complete transfer becomes readable."""
        self.pair.publish()

    @rule()
    def retire(self) -> None:
        """A sequence ends, and its pages are given to others."""
        self.pages.retire()

    @precondition(lambda self: self.pair.records)
    @rule(transfer_id=st.integers(1, 40))
    def cancel(self, transfer_id: int) -> None:
        """A client goes, whatever its transfer is doing."""
        self.pair.cancel(1 + transfer_id % len(self.pair.records))

    @precondition(lambda self: self.pair.records)
    @rule(transfer_id=st.integers(1, 40))
    def expire(self, transfer_id: int) -> None:
        """A time limit passes at prefill."""
        self.pair.expire(1 + transfer_id % len(self.pair.records))

    @precondition(lambda self: self.pair.imports)
    @rule(index=st.integers(0, 5))
    def fail_import(self, index: int) -> None:
        """A copy ends badly."""
        self.pair.end_import(index, COPY_FAILED)

    @precondition(lambda self: self.pair.engine.running)
    @rule()
    def fail_engine(self) -> None:
        """The device is lost in the running job."""
        self.pair.fail_engine()

    @precondition(lambda self: len(self.pair.records) > 1)
    @rule()
    def shut_prefill_down(self) -> None:
        """Prefill is told to end: what it has accepted goes on."""
        self.pair.shut_prefill_down()

    @precondition(lambda self: len(self.pair.records) > 1)
    @rule()
    def close_prefill(self) -> None:
        """Prefill learns first that the stream is gone."""
        self.pair.close_prefill()

    @precondition(lambda self: len(self.pair.records) > 1)
    @rule()
    def reconnect(self) -> None:
        """Decode loses the stream, abandons the slab and opens a new session with a new one."""
        self.pair.close_decode()
        self.pair = self.add_pair()

    @invariant()
    def is_whole(self) -> None:
        """Machines, slots, pages and published bytes agree after every step."""
        for pair in getattr(self, "pairs", []):
            pair.check()
            assert pair.engine.is_idle or not pair.has_left or pair.is_broken, "decode left under a writer"
            for record in pair.records.values():
                assert record.error is None or isinstance(record.error, HONEST_OUTCOMES), record.error

    def teardown(self) -> None:
        """Everything ends once nothing new happens, and nothing is held."""
        for pair in getattr(self, "pairs", []):
            pair.settle()
            pair.check()
            pair.check_settled()
        if self.pairs:
            assert self.pages.num_leased == 0


HonestPair.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHonestPair = HonestPair.TestCase


@pytest.mark.parametrize(
    ("mode", "is_tight"),
    [*((mode, False) for mode in TransferMode), (TransferMode.STREAM, True), (TransferMode.WHOLE, True)],
)
def test_an_undisturbed_transfer_publishes_what_the_engine_made(mode: TransferMode, is_tight: bool) -> None:
    """The walk the machine above must be able to take: without it, its rules would hold of nothing."""
    pages = PageStore(PAGE_BYTES)
    pair = SessionPair("walk", pages)
    pair.settle()

    started = pair.start(Wish(10, 3, mode, is_tight))
    pair.settle()

    assert started
    assert pair.records[1].is_published
    assert pair.decode.statistics().unknown_messages == 0
    assert pages.num_leased == 0
    pair.check_settled()


def test_what_runs_is_published_when_prefill_is_told_to_end() -> None:
    """The last word of decode comes after the last terminal message of prefill, and not before."""
    pair = SessionPair("walk", PageStore(PAGE_BYTES))
    pair.settle()
    pair.start(Wish(10, 3, TransferMode.STREAM, False))
    pair.deliver_to_prefill()
    pair.shut_prefill_down()
    assert pair.start(Wish(4, 0, TransferMode.STREAM, False)), "decode has not heard yet"

    while not pair.has_left:
        assert pair.advance()
    pair.settle()

    assert pair.records[1].is_published
    assert isinstance(pair.records[2].error, PeerUnavailable)
    assert not pair.start(Wish(4, 0, TransferMode.STREAM, False))
    pair.check_settled()


def test_failures_reach_the_record_with_their_reason() -> None:
    """The outcome of an engine's failure is that failure and no other."""
    pair = SessionPair("walk", PageStore(PAGE_BYTES))
    pair.settle()
    pair.start(Wish(10, 3, TransferMode.STREAM, False))
    for _ in range(5):
        pair.advance()
    pair.fail_engine()
    pair.settle()

    error: KVSpanError | None = pair.records[1].error
    assert isinstance(error, PrefillEngineFailed)
    assert "a device was lost" in str(error)
