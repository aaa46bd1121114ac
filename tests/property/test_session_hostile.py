"""Whatever a stream does to messages, only what the engine made is published and nothing is reused early."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import NegotiationError, RemoteProtocolError
from common.session.decode_side import SessionState
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    Hello,
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillMessage,
    ReleaseSpan,
    SpanSealed,
    StartPrefill,
    TransferMode,
)
from tests.support.peer_parts import PageStore, Wish
from tests.support.peers import SessionPair
from tests.support.sessions import make_logits

PAGE_BYTES = 4_096
Message = DecodeMessage | PrefillMessage
SPAN_CHANGES: tuple[Callable[[SpanSealed], SpanSealed], ...] = (
    lambda told: SpanSealed(replace(told.span, transfer_id=told.span.transfer_id + 1)),
    lambda told: SpanSealed(replace(told.span, attempt=2)),
    lambda told: SpanSealed(replace(told.span, slot_id=told.span.slot_id + 1)),
    lambda told: SpanSealed(replace(told.span, generation=told.span.generation + 1)),
    lambda told: SpanSealed(replace(told.span, sequence=told.span.sequence + 1)),
    lambda told: SpanSealed(replace(told.span, group_index=told.span.group_index ^ 1)),
    lambda told: SpanSealed(replace(told.span, offset=told.span.offset + 64)),
    lambda told: SpanSealed(replace(told.span, length=told.span.length + 64)),
    lambda told: SpanSealed(replace(told.span, digest=bytes(8))),
    lambda told: SpanSealed(replace(told.span, digest=b"")),
)


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    """Draw a transfer."""
    prompt_len = draw(st.integers(1, 10))
    return Wish(prompt_len, prompt_len // 3, draw(st.sampled_from(TransferMode)), draw(st.booleans()))


DONE_CHANGES: tuple[Callable[[PrefillDone], PrefillDone], ...] = (
    lambda done: replace(done, attempt=2),
    lambda done: replace(done, generation=done.generation + 1),
    lambda done: replace(done, totals=done.totals[:1]),
    lambda done: replace(done, totals=(replace(done.totals[0], num_spans=7), *done.totals[1:])),
    lambda done: replace(done, logits=make_logits(at_3=float("nan"))),
    lambda done: replace(done, logits=done.logits[:-4]),
)


def corrupted(message: Message, choice: int) -> Message:
    """Return the message with one field changed.

    What says that the producer has ended keeps its id: a peer that claims the end of another transfer
    cannot be told from an honest one.
    """
    match message:
        case SpanSealed():
            return SPAN_CHANGES[choice % len(SPAN_CHANGES)](message)
        case PrefillDone():
            return DONE_CHANGES[choice % len(DONE_CHANGES)](message)
        case StartPrefill():
            return (
                replace(message, generation=message.generation + 1)
                if choice % 2
                else replace(message, attempt=2)
            )
        case ReleaseSpan():
            return replace(message, sequence=message.sequence + choice % 3)
        case PrefillAccepted() | PrefillFailed() | PrefillCancelled() | CancelPrefill():
            return replace(message, attempt=2)
        case _:
            return message


class HostileStream(RuleBasedStateMachine):
    """Messages are dropped, repeated, overtaken, changed and replayed; sides fail and cancel as ever."""

    @initialize(wish=wishes())
    def connect(self, wish: Wish) -> None:
        """Open a session in peace and start a transfer."""
        self.pages = PageStore(PAGE_BYTES)
        self.pairs: list[SessionPair] = []
        self.pair = self.add_pair()
        self.pair.start(wish)

    def add_pair(self) -> SessionPair:
        """Open another session with another slab."""
        pair = SessionPair(f"session-{len(self.pairs)}", self.pages)
        while pair.decode.state is not SessionState.OPEN:
            assert pair.advance()
        self.pairs.append(pair)
        return pair

    def queue(self, towards_decode: bool) -> deque[Message]:
        """Return the messages under way in one direction."""
        return self.pair.to_decode if towards_decode else self.pair.to_prefill  # type: ignore[return-value]

    def attempt(self, step: Callable[[], object]) -> None:
        """Take a step; a message that no session survives breaks the stream for both."""
        try:
            step()
        except (RemoteProtocolError, NegotiationError):
            self.pair.close_prefill()
            self.pair.close_decode()

    @rule(wish=wishes(), steps=st.integers(0, 20))
    def start(self, wish: Wish, steps: int) -> None:
        """Start a transfer, if it fits, and let everybody go on."""
        self.pair.start(wish)
        self.advance(steps)

    @rule(steps=st.integers(1, 30))
    def go_on(self, steps: int) -> None:
        """Everybody goes on for a while."""
        self.advance(steps)

    def advance(self, steps: int) -> None:
        """Take steps of every party, as far as the session lets them."""
        for _ in range(steps):
            self.attempt(self.pair.advance)

    @rule(towards_decode=st.booleans(), steps=st.integers(1, 4))
    def deliver(self, towards_decode: bool, steps: int) -> None:
        """Some messages arrive and nobody else moves."""
        for _ in range(steps):
            self.attempt(self.pair.deliver_to_decode if towards_decode else self.pair.deliver_to_prefill)

    @rule(notices_stop=st.booleans(), steps=st.integers(1, 6))
    def step_engine(self, notices_stop: bool, steps: int) -> None:
        """The engine works while nothing is delivered."""
        for _ in range(steps):
            self.pair.step_engine(notices_stop)

    @rule(index=st.integers(0, 5))
    def copy(self, index: int) -> None:
        """The importer moves on by a half."""
        self.pair.end_import(index)
        self.pair.begin_import(index)

    @rule(towards_decode=st.booleans(), index=st.integers(0, 5))
    def drop(self, towards_decode: bool, index: int) -> None:
        """A message is lost."""
        queue = self.queue(towards_decode)
        if queue:
            del queue[index % len(queue)]

    @rule(towards_decode=st.booleans(), index=st.integers(0, 5))
    def repeat(self, towards_decode: bool, index: int) -> None:
        """A message comes twice."""
        queue = self.queue(towards_decode)
        if queue:
            queue.append(queue[index % len(queue)])

    @rule(towards_decode=st.booleans(), index=st.integers(0, 5))
    def delay(self, towards_decode: bool, index: int) -> None:
        """A message is overtaken by all that follow."""
        queue = self.queue(towards_decode)
        if queue:
            message = queue[index % len(queue)]
            del queue[index % len(queue)]
            queue.append(message)

    @rule(towards_decode=st.booleans(), index=st.integers(0, 5), choice=st.integers(0, 29))
    def corrupt(self, towards_decode: bool, index: int, choice: int) -> None:
        """A field of a message changes."""
        queue = self.queue(towards_decode)
        if queue:
            queue[index % len(queue)] = corrupted(queue[index % len(queue)], choice)

    @rule(index=st.integers(0, 200))
    def replay(self, index: int) -> None:
        """A message of long ago comes again, a Hello or a Welcome among them."""
        message = self.pair.history[-1 - index % len(self.pair.history)]
        is_of_decode = isinstance(message, Hello | StartPrefill | ReleaseSpan | CancelPrefill)
        self.queue(not is_of_decode).append(message)

    @precondition(lambda self: self.pair.records)
    @rule(transfer_id=st.integers(1, 40), steps=st.integers(0, 10))
    def restart(self, transfer_id: int, steps: int) -> None:
        """A transfer is asked for again, while it lives or long after."""
        record = self.pair.records[1 + transfer_id % len(self.pair.records)]
        self.pair.to_prefill.append(record.start)
        self.advance(steps)

    @precondition(lambda self: self.pair.records)
    @rule(transfer_id=st.integers(1, 40))
    def cancel(self, transfer_id: int) -> None:
        """A client goes."""
        self.pair.cancel(1 + transfer_id % len(self.pair.records))

    @rule()
    def shut_prefill_down(self) -> None:
        """Prefill is told to end."""
        if self.pair.records:
            self.pair.shut_prefill_down()

    @rule()
    def retire(self) -> None:
        """A sequence ends, and its pages are given to others."""
        self.pages.retire()

    @precondition(lambda self: self.pair.is_broken or len(self.pair.records) > 2)
    @rule()
    def reconnect(self) -> None:
        """What cannot drain any more is ended with its session."""
        self.pair.close_decode()
        self.pair = self.add_pair()

    @invariant()
    def is_whole(self) -> None:
        """Machines, slots, pages and published bytes agree after every step."""
        for pair in getattr(self, "pairs", []):
            pair.check()

    def teardown(self) -> None:
        """Closing both ends ends everything that messages no longer can."""
        for pair in getattr(self, "pairs", []):
            pair.close_decode()
            pair.settle()
            pair.check()
            pair.check_settled()
        assert self.pages.num_leased == 0


HostileStream.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHostileStream = HostileStream.TestCase


def test_every_change_of_a_span_or_an_end_keeps_a_transfer_from_publication() -> None:
    """The changes above are faults: each alone ends the transfer it touches."""
    for kind, changes in ((SpanSealed, SPAN_CHANGES), (PrefillDone, DONE_CHANGES)):
        for choice in range(len(changes)):
            pair = SessionPair("walk", PageStore(PAGE_BYTES))
            pair.settle()
            pair.start(Wish(10, 3, TransferMode.WHOLE, False))
            while not pair.to_decode or not isinstance(pair.to_decode[-1], PrefillDone):
                assert pair.step_engine() or pair.deliver_to_prefill()
            position = next(i for i, message in enumerate(pair.to_decode) if isinstance(message, kind))
            pair.to_decode[position] = corrupted(pair.to_decode[position], choice)  # type: ignore[assignment]

            pair.settle()

            assert not pair.records[1].is_published, (kind, choice)
            assert pair.records[1].error is not None, (kind, choice)
