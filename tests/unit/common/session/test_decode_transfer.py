"""The life of one transfer as the decode service sees it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import (
    Cancelled,
    LocalProtocolError,
    RemoteProtocolError,
)
from common.session.actions import ImportSpan, Send, TransferComplete
from common.session.decode_transfer import DecodeTransfer
from common.session.messages import PrefillDone, ReleaseSpan
from common.session.transfer_states import BEYOND_PEER, OVER, TERMINAL, TRANSITIONS, TransferState
from common.session.transfer_states import TransferEvent as Event
from tests.support.sessions import (
    SPANS,
    START,
    TIMINGS,
    make_done,
    make_logits,
    make_start,
    sent,
)
from tests.support.transfers import (
    CAUSE,
    DONE,
    DRAINED,
    ENDS,
    IN_STATE,
    assert_failed,
    make_aborting_transfer,
    make_ending_transfer,
    make_streaming_transfer,
    make_transfer,
)

State = TransferState


DELIVER: dict[Event, Callable[[DecodeTransfer], object]] = {
    Event.START: lambda transfer: transfer.start(),
    Event.ACCEPTED: lambda transfer: transfer.accepted(),
    Event.SPAN: lambda transfer: transfer.span(SPANS[1]),
    Event.DONE: lambda transfer: transfer.done(DONE),
    Event.PUBLISH: lambda transfer: transfer.published(),
    Event.ABORT: lambda transfer: transfer.abort(CAUSE),
}
LOCAL = (Event.START, Event.PUBLISH)
REMOTE = (Event.ACCEPTED, Event.SPAN, Event.DONE)
UNLISTED = [(state, event) for state in State for event in Event if (state, event) not in TRANSITIONS]


def test_the_table_is_the_diagram() -> None:
    """Every arrow of the diagram is listed, and nothing else."""
    walk = [
        (State.RESERVED, Event.START, State.REQUESTED),
        (State.REQUESTED, Event.ACCEPTED, State.STREAMING),
        (State.STREAMING, Event.SPAN, State.STREAMING),
        (State.STREAMING, Event.DONE, State.ENDING),
        (State.ENDING, Event.IMPORTED, State.COMPLETE),
        (State.COMPLETE, Event.PUBLISH, State.PUBLISHED),
        (State.ABORTING, Event.DRAINED, State.ENDED),
    ]
    alive = [State.RESERVED, State.REQUESTED, State.STREAMING, State.ENDING, State.COMPLETE]
    aborts = [(state, Event.ABORT, State.ABORTING) for state in alive]

    assert {(state, event): after for state, event, after in walk + aborts} == TRANSITIONS


def test_every_state_can_be_reached_and_terminal_states_have_no_exit() -> None:
    """A state without a way in is dead code; a terminal state with a way out is not terminal."""
    reached = {State.RESERVED}
    for _ in State:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}

    assert reached == set(State)
    assert {state for state in State if not any(before is state for before, _ in TRANSITIONS)} == TERMINAL
    assert TERMINAL | {State.ABORTING} == OVER
    assert OVER | {State.ENDING, State.COMPLETE} == BEYOND_PEER


def test_the_fixtures_stand_where_they_say() -> None:
    """Each state has a walk that leads there."""
    assert {state: make().state for state, make in IN_STATE.items()} == {state: state for state in State}


@pytest.mark.parametrize(("state", "event"), [pair for pair in UNLISTED if pair[1] in LOCAL])
def test_an_illegal_local_event_raises_and_changes_nothing(state: TransferState, event: Event) -> None:
    """What we would break is our error: no action, no new state."""
    transfer = IN_STATE[state]()
    before = transfer.statistics()

    with pytest.raises(LocalProtocolError):
        DELIVER[event](transfer)

    assert transfer.statistics() == before


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in UNLISTED if pair[1] in REMOTE and pair[0] not in BEYOND_PEER]
)
def test_an_illegal_message_fails_the_transfer(state: TransferState, event: Event) -> None:
    """What the peer breaks costs this transfer and never raises into the session."""
    transfer = IN_STATE[state]()

    assert_failed(DELIVER[event](transfer), RemoteProtocolError)
    assert transfer.state in (State.ABORTING, State.ENDED)


@pytest.mark.parametrize("state", [state for state in State if state in OVER])
@pytest.mark.parametrize("event", [*REMOTE, Event.ABORT])
def test_a_late_event_is_counted_and_ignored(state: TransferState, event: Event) -> None:
    """Rule 6: the first outcome stands."""
    transfer = IN_STATE[state]()
    before = transfer.statistics()

    actions = DELIVER[event](transfer)

    assert actions == ()
    assert transfer.statistics() == replace(before, late_events=before.late_events + 1)


@pytest.mark.parametrize("state", [state for state in State if state not in OVER])
def test_an_abort_is_legal_until_the_outcome_is_decided(state: TransferState) -> None:
    """A client may go at any time before publication."""
    transfer = IN_STATE[state]()

    assert_failed(transfer.abort(CAUSE), Cancelled)
    assert transfer.error is CAUSE


def test_a_transfer_walks_from_start_to_publication() -> None:
    """Each step asks for exactly one thing."""
    transfer = make_transfer()

    assert transfer.start() == (Send(START),)
    assert transfer.accepted() == ()
    for span in SPANS:
        assert transfer.span(span) == (ImportSpan(span),)
    for sequence in (1, 0, 2, 4, 3):
        assert transfer.import_finished(sequence) == (Send(ReleaseSpan(21, 1, sequence)),)
    assert transfer.done(DONE) == ()
    assert transfer.import_finished(5) == (TransferComplete(21),)
    assert transfer.published() == (DRAINED,)
    assert transfer.state is State.PUBLISHED
    assert transfer.error is None


def test_done_completes_at_once_when_every_copy_has_ended() -> None:
    """Copies may be faster than the producer's end."""
    transfer = make_streaming_transfer(*SPANS)
    for span in SPANS:
        transfer.import_finished(span.sequence)

    assert transfer.done(DONE) == (TransferComplete(21),)


def test_logits_and_timings_are_those_of_done() -> None:
    """The first token comes from the producer's own last position."""
    transfer = make_ending_transfer()

    assert transfer.producer.done.logits == make_logits()
    assert transfer.producer.done.timings == TIMINGS


def test_statistics_count_what_is_in_flight() -> None:
    """A sealed span is in flight until its copy ends."""
    transfer = make_streaming_transfer(*SPANS[:3])
    transfer.import_finished(1)

    counts = transfer.statistics()

    assert (counts.spans_in_flight, counts.duplicates) == (2, 0)


def test_spans_may_come_in_any_order() -> None:
    """Nothing is inferred from order."""
    transfer = make_streaming_transfer(*reversed(SPANS))
    transfer.done(DONE)

    actions = [transfer.import_finished(sequence) for sequence in (3, 5, 0, 4, 1, 2)]

    assert actions == [(), (), (), (), (), (TransferComplete(21),)]


def test_no_credit_is_given_to_a_producer_that_has_ended() -> None:
    """After Done nobody waits for bytes."""
    transfer = make_streaming_transfer(*SPANS)
    transfer.done(DONE)

    assert sent(transfer.import_finished(0)) == []


def test_bytes_may_be_used_again_once_they_were_released() -> None:
    """A request larger than its slot streams through it."""
    transfer = make_streaming_transfer(SPANS[0])
    reused = replace(SPANS[2], offset=SPANS[0].offset)
    transfer.import_finished(0)

    assert transfer.span(reused) == (ImportSpan(reused),)


@pytest.mark.parametrize("later", [name for name in ENDS if "copy" not in name])
def test_the_first_outcome_stands_whatever_comes_later(later: str) -> None:
    """The error of the first terminal event is never replaced."""
    transfer = make_streaming_transfer(SPANS[0])
    transfer.failed("ENGINE_FAILED", "a device was lost")
    first = transfer.error

    assert ENDS[later](transfer) == ()
    assert transfer.error is first


@pytest.mark.parametrize("again", ["cancelled", "failed", "done"])
def test_a_second_terminal_message_is_counted(again: str) -> None:
    """Rule 6: one answer to our cancel is expected, a second one is late."""
    transfer = make_aborting_transfer()
    transfer.cancelled()

    ENDS[again](transfer)

    assert transfer.statistics().late_events == 1


def test_the_answer_to_a_cancel_is_not_late() -> None:
    """PrefillCancelled is what we asked for."""
    transfer = make_aborting_transfer()
    transfer.cancelled()

    assert transfer.statistics().late_events == 0


@pytest.mark.parametrize("sequence", [1, 0])
def test_the_end_of_a_copy_that_is_not_under_way_raises(sequence: int) -> None:
    """A copy ends once, and only if it was asked for."""
    transfer = make_streaming_transfer(SPANS[0])
    transfer.import_finished(0)
    before = transfer.statistics()

    with pytest.raises(KeyError):
        transfer.import_finished(sequence)

    assert transfer.statistics() == before


def test_a_done_without_any_span_completes_when_nothing_is_required() -> None:
    """A19: a window that decode holds already leaves nothing to carry and still ends."""
    start = make_start(first_tokens=(5,))
    transfer = make_transfer(start)
    transfer.start()
    transfer.accepted()

    actions = transfer.done(PrefillDone(21, 1, 3, make_done(start, ()).totals, make_logits(), TIMINGS))

    assert actions == (TransferComplete(21),)
