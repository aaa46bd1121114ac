"""Once the Done of a producer was accepted, its transfer ends the same whatever the peer says or becomes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import Cancelled, ChecksumMismatch, KVSpanError, PeerLost
from common.session.actions import DecodeAction, SlabIdle, TransferComplete, TransferDrained, TransferFailed
from common.session.decode_side import DecodeSession
from common.session.messages import (
    PrefillAccepted,
    PrefillCancelled,
    PrefillFailed,
    PrefillMessage,
    SpanSealed,
)
from tests.support.sessions import SPANS, START, begin, make_done, make_open_decode_session, tell

CAUSE = Cancelled("by the client")
LOST = PeerLost("stream broke")
DONE = make_done(START, SPANS)

LATE: dict[str, PrefillMessage] = {
    "failed": PrefillFailed(21, 1, "ENGINE_FAILED", "a device was lost"),
    "failed of another attempt": PrefillFailed(21, 2, "ENGINE_FAILED", "a device was lost"),
    "shutting down": PrefillFailed(21, 1, "SHUTTING_DOWN", "tired"),
    "cancelled": PrefillCancelled(21, 1),
    "done": DONE,
    "done of another generation": replace(DONE, generation=2),
    "done with other totals": replace(DONE, totals=()),
    "accepted": PrefillAccepted(21, 1, 0),
    "span again": SpanSealed(SPANS[0]),
    "another span": SpanSealed(replace(SPANS[0], sequence=9)),
}
POINTS = range(len(SPANS) + 1)
"""Copies that have ended before the late event."""


def make_ending_session(num_copied: int) -> DecodeSession:
    """Return a session whose transfer has its Done, with so many copies ended."""
    session = make_open_decode_session()
    begin(session)
    tell(session)
    end_copies(session, range(num_copied))
    return session


def end_copies(session: DecodeSession, sequences: range) -> list[DecodeAction]:
    """End copies well; return all actions."""
    return [action for sequence in sequences for action in session.import_finished(21, sequence)]


@pytest.mark.parametrize("num_copied", POINTS)
@pytest.mark.parametrize("late", LATE)
def test_a_word_after_an_accepted_end_is_counted_and_changes_nothing(late: str, num_copied: int) -> None:
    """Y29: the first accepted end stands; else the outcome would depend on how far the copies are."""
    session = make_ending_session(num_copied)

    assert session.receive(LATE[late]) == ()

    assert session.statistics().late_events == 1
    completed = end_copies(session, range(num_copied, len(SPANS)))
    assert completed == ([TransferComplete(21)] if num_copied < len(SPANS) else [])
    assert session.published(21) == (TransferDrained(21),)


@pytest.mark.parametrize("num_copied", POINTS)
def test_a_peer_lost_after_an_accepted_end_changes_nothing(num_copied: int) -> None:
    """Y29: what needs the slab only is published, and the slab is idle after that and not before."""
    session = make_ending_session(num_copied)

    assert session.close(LOST) == ()

    session.check_integrity()
    completed = end_copies(session, range(num_copied, len(SPANS)))
    assert completed == ([TransferComplete(21)] if num_copied < len(SPANS) else [])
    assert session.published(21) == (TransferDrained(21), SlabIdle())


FAILURES: dict[str, tuple[KVSpanError, Callable[[DecodeSession, KVSpanError], tuple[DecodeAction, ...]]]] = {
    "cancel": (CAUSE, lambda session, error: session.abort(21, error)),
    "bad copy": (
        ChecksumMismatch(5, "aa", "bb"),
        lambda session, error: session.import_failed(21, 5, error),
    ),
}


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_this_side_can_still_give_up_after_an_accepted_end(failure: str, is_lost: bool) -> None:
    """A client that goes and a digest that does not match are ends of our own, with or without the peer."""
    session = make_ending_session(len(SPANS) - 2)
    if is_lost:
        session.close(LOST)
    error, fail = FAILURES[failure]

    failed = fail(session, error)
    drained = [session.import_finished(21, one) for one in ((4,) if failure == "bad copy" else (4, 5))]

    assert failed == (TransferFailed(21, error),)
    assert drained[-1] == ((TransferDrained(21), SlabIdle()) if is_lost else (TransferDrained(21),))
