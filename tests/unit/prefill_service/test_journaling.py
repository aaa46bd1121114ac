"""Tests of the lines that the prefill service writes: who, what, and before it is carried out."""

from __future__ import annotations

import pytest

from common.kv.ranges import Range
from common.session.actions import Enqueue, Send, SlabIdle
from common.session.messages import PrefillCancelled, PrefillFailed, ReleaseSpan, SpanSealed
from common.telemetry.journal import Event
from prefill_service.journaling import PeerJournal, PrefillJournal
from tests.support.factories import make_hybrid_geometry, paged
from tests.support.fakes import Lines
from tests.support.sessions import make_hello, make_spans, make_start, make_welcome


@pytest.fixture
def lines() -> Lines:
    """Return an empty journal."""
    return Lines()


@pytest.fixture
def peer(lines: Lines) -> PeerJournal:
    """Return the lines of a session that has opened; that line is not kept."""
    peer = PrefillJournal(lines).peer()
    peer.received(make_hello())
    peer.acted(Send(make_welcome()))
    lines.kept.clear()
    return peer


START = make_start(21, slot_bytes=Range(4096, 8192))
NAME = {
    "peer": make_hello().boot_id,
    "session": make_hello().slab.name,
    "transfer": 21,
    "attempt": START.attempt,
}


def test_life_begins_with_the_shape_of_its_kv(lines: Lines) -> None:
    """An auditor must know which layers each side owns."""
    geometry = paged(make_hybrid_geometry(windows=(6, None)))
    journal = PrefillJournal(lines)
    journal.service_started(geometry)
    journal.service_stopped()

    assert lines.events == [Event.SERVICE_STARTED, Event.SERVICE_STOPPED]
    assert lines.kept[0][1]["layers"] == [group.num_layers for group in geometry.groups]
    assert lines.kept[0][1]["row_bytes"] == [group.row_bytes for group in geometry.groups]


def test_session_is_named_by_peer_and_slab(lines: Lines) -> None:
    """Welcome opens a session; until then there is nothing to tell."""
    peer = PrefillJournal(lines).peer()
    peer.received(make_hello())
    assert lines.kept == []

    peer.acted(Send(make_welcome()))

    event, fields = lines.kept[0]
    assert event is Event.SESSION_OPENED
    assert fields["peer"] == make_hello().boot_id
    assert fields["session"] == make_hello().slab.name


def test_session_that_never_opened_leaves_no_line(lines: Lines) -> None:
    """A refused peer holds nothing."""
    peer = PrefillJournal(lines).peer()
    peer.received(make_hello())

    peer.closed()
    peer.acted(SlabIdle())

    assert lines.kept == []


def test_transfer_is_told_from_acceptance_to_answer(peer: PeerJournal, lines: Lines) -> None:
    """Every line of a transfer names it; a release that arrives is credit."""
    told = make_spans(START)[0]
    peer.acted(Enqueue(START))
    peer.acted(Send(SpanSealed(told)))
    peer.received(ReleaseSpan(21, START.attempt, told.sequence))
    peer.drained(21)
    peer.acted(Send(PrefillCancelled(21, START.attempt)))

    assert lines.events == [
        Event.TRANSFER_ACCEPTED,
        Event.SPAN_SEALED,
        Event.SPAN_CREDITED,
        Event.TRANSFER_DRAINED,
        Event.TRANSFER_ANSWERED,
    ]
    assert all(fields.items() >= NAME.items() for _, fields in lines.kept)
    assert lines.kept[0][1]["extent"] == [4096, 8192]
    assert lines.kept[-1][1]["verdict"] == "cancelled"


def test_refused_start_has_no_answer(peer: PeerJournal, lines: Lines) -> None:
    """What was never accepted moved no byte."""
    peer.acted(Send(PrefillFailed(21, 1, "START_REFUSED", "no")))
    peer.received(ReleaseSpan(21, 1, 3))

    assert lines.kept == []


def test_journal_that_is_off_takes_everything() -> None:
    """Off, nothing is remembered that only a line needs."""
    peer = PrefillJournal().peer()
    peer.received(make_hello())
    peer.acted(Send(make_welcome()))
    peer.acted(Enqueue(START))
    peer.drained(21)
    peer.drained(21)
    peer.closed()
