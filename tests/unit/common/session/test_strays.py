"""How much nonsense a session takes before it is cut off, on either side."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import Cancelled, ChecksumMismatch, LeaseExpired, RemoteProtocolError
from common.kv.ranges import Range
from common.session.decode_side import DecodeSession
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    GoAway,
    Pong,
    PrefillAccepted,
    PrefillCancelled,
    PrefillFailed,
    PrefillMessage,
    ReleaseSpan,
    SpanSealed,
)
from common.session.prefill_side import PrefillSession
from tests.support.sessions import (
    SPANS,
    START,
    begin,
    make_coverage,
    make_done,
    make_open_decode_session,
    make_open_prefill_session,
    make_queued_job,
    make_running_job,
    make_stopping_job,
    renamed,
)

MANY = 1100
"""More than the bound of a session of `make_offer`."""

CUT_OFF = r"\d+ strays, at most 10\d\d may come"


def make_aborting() -> DecodeSession:
    """Return a session with a transfer that was given up while its producer works."""
    session = make_open_decode_session()
    begin(session)
    session.abort(21, Cancelled("by the client"))
    return session


def make_ending() -> DecodeSession:
    """Return a session with a transfer whose end was accepted and whose copies are under way."""
    session = make_streaming()
    session.receive(make_done(START, SPANS))
    return session


def make_streaming() -> DecodeSession:
    """Return a session with a transfer of which every span was told."""
    session = make_open_decode_session()
    begin(session)
    for span in SPANS:
        session.receive(SpanSealed(span))
    return session


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_open_prefill_session, ReleaseSpan(9, 1, 3)),
        (make_open_prefill_session, CancelPrefill(9, 1, "")),
        (make_open_prefill_session, replace(START, token_ids=())),
        (make_queued_job, START),
        (make_running_job, ReleaseSpan(21, 1, 3)),
        (make_stopping_job, CancelPrefill(21, 1, "")),
    ],
    ids=["unknown release", "unknown cancel", "refused start", "repeated start", "unsealed", "cancel again"],
)
def test_a_decode_that_says_nothing_but_nonsense_is_cut_off(
    make: Callable[[], PrefillSession], message: DecodeMessage
) -> None:
    """Each is ignored or refused, but not for ever; the error has the count and the bound."""
    session = make()
    before = session.statistics().num_jobs

    with pytest.raises(RemoteProtocolError, match=CUT_OFF):
        for _ in range(MANY):
            session.receive(message)

    assert session.statistics().num_jobs == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_open_decode_session, SpanSealed(SPANS[0])),
        (make_open_decode_session, PrefillFailed(9, 1, "ENGINE_FAILED", "")),
        (make_open_decode_session, Pong(1)),
        (make_streaming, GoAway("again")),
        (make_streaming, SpanSealed(SPANS[0])),
        (make_aborting, SpanSealed(SPANS[0])),
        (make_aborting, PrefillAccepted(21, 1, 0)),
        (make_ending, make_done(START, SPANS)),
        (make_ending, SpanSealed(SPANS[0])),
        (make_ending, PrefillCancelled(21, 2)),
    ],
    ids=[
        "unknown span",
        "unknown end",
        "pong unasked",
        "go away again",
        "duplicate",
        "late duplicate",
        "late acceptance",
        "second end",
        "span after the end",
        "end of another attempt",
    ],
)
def test_a_prefill_that_says_nothing_but_nonsense_is_cut_off(
    make: Callable[[], DecodeSession], message: PrefillMessage
) -> None:
    """The same rule as on the other side."""
    session = make()
    before = session.statistics().num_transfers

    with pytest.raises(RemoteProtocolError, match=CUT_OFF):
        for _ in range(MANY):
            session.receive(message)

    assert session.statistics().num_transfers == before


def test_a_prefill_whose_digests_are_always_wrong_is_cut_off_after_a_few_prompts() -> None:
    """Each costs a request: their number is small, and everything that failed has ended."""
    session = make_open_decode_session()
    lost = 0

    with pytest.raises(RemoteProtocolError, match=CUT_OFF):
        for transfer_id in range(1, MANY):
            start = renamed(START, transfer_id, Range(4096, 12_288))
            begin(session, start)
            session.receive(SpanSealed(replace(SPANS[0], transfer_id=transfer_id, slot_id=start.slot_id)))
            session.import_failed(transfer_id, 0, ChecksumMismatch(0, "aa", "bb"))
            lost += 1
            session.receive(PrefillCancelled(transfer_id, 1))

    assert lost == 6
    assert session.statistics().num_transfers == 1


@pytest.mark.parametrize("make", [make_open_prefill_session, make_queued_job])
def test_starts_of_very_long_prompts_are_cut_off_sooner(make: Callable[[], PrefillSession]) -> None:
    """Each had to be read: whether it is refused or repeated, its tokens count."""
    session = make()
    start = replace(START, token_ids=(1,) * 500_000)
    for _ in range(2):
        session.receive(start)

    with pytest.raises(RemoteProtocolError, match=CUT_OFF):
        session.receive(start)


def test_what_an_honest_decode_says_too_late_is_never_too_much() -> None:
    """Of each transfer the release of every span and one cancel may cross the end."""
    session = make_open_prefill_session()

    for transfer_id in range(21, 21 + MANY):
        session.receive(replace(START, transfer_id=transfer_id))
        session.engine_started(transfer_id)
        for span in SPANS:
            session.span_written(replace(span, transfer_id=transfer_id))
        session.expire(transfer_id, LeaseExpired("its time limit"))
        session.receive(CancelPrefill(transfer_id, 1, "its client has gone"))
        session.engine_failed(transfer_id, LeaseExpired("its time limit"))
        for span in SPANS:
            session.receive(ReleaseSpan(transfer_id, 1, span.sequence))

    assert session.statistics().ignored.unknown_messages == MANY * len(SPANS)


def test_what_an_honest_prefill_says_too_late_is_never_too_much() -> None:
    """Of each transfer the acceptance, every span and the end may cross the cancel."""
    session = make_open_decode_session()

    for transfer_id in range(1, 1 + MANY):
        start = renamed(START, transfer_id, Range(4096, 12_288))
        session.begin(start, make_coverage(start))
        session.abort(transfer_id, Cancelled("by the client"))
        session.receive(PrefillAccepted(transfer_id, 1, 0))
        for span in SPANS:
            session.receive(SpanSealed(replace(span, transfer_id=transfer_id)))
        session.receive(make_done(start, SPANS))

    assert session.statistics().late_events == MANY * (len(SPANS) + 2)
    assert session.statistics().num_transfers == 0
