"""Tests of the lines that the decode service writes: who, what, and before it takes effect."""

from __future__ import annotations

import pytest

from common.errors import Cancelled
from common.kv.ranges import Range
from common.session.actions import (
    ImportSpan,
    Send,
    SlabIdle,
    TransferComplete,
    TransferDrained,
    TransferFailed,
)
from common.session.messages import PrefillCancelled, ReleaseSpan
from common.slab.allocator import Slot
from common.telemetry.journal import Event
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Reservation
from decode_service.prefill.journaling import DecodeJournal, SessionJournal
from tests.support.factories import make_hybrid_geometry, paged
from tests.support.fakes import Lines
from tests.support.sessions import make_done, make_spans, make_start, make_welcome

GEOMETRY = paged(make_hybrid_geometry(windows=(6, None)))
START = make_start(21, slot_bytes=Range(4096, 8192))
SLAB = "kvspan-7.slab"
NAME = {"peer": make_welcome().boot_id, "session": SLAB, "transfer": 21, "attempt": START.attempt}


@pytest.fixture
def lines() -> Lines:
    """Return an empty journal."""
    return Lines()


@pytest.fixture
def journal(lines: Lines) -> DecodeJournal:
    """Return what writes into `lines`."""
    return DecodeJournal(lines)


@pytest.fixture
def session(journal: DecodeJournal) -> SessionJournal:
    """Return the lines of an open session."""
    session = journal.session(SLAB)
    session.opened(make_welcome(), Range(4096, 65536))
    return session


def make_reservation() -> Reservation:
    """Return pages of a request in two groups."""
    return Reservation(KVCache(GEOMETRY, (30, 40)).reserve(9, 2), lambda _: None)


def test_life_begins_with_what_it_has(journal: DecodeJournal, lines: Lines) -> None:
    """An auditor must know the pages of every group and the layers that own KV."""
    journal.service_started(GEOMETRY, (30, 40))
    journal.service_stopped()

    assert lines.events == [Event.SERVICE_STARTED, Event.SERVICE_STOPPED]
    assert lines.kept[0][1]["pages"] == [30, 40]
    assert lines.kept[0][1]["layers"] == [group.num_layers for group in GEOMETRY.groups]


def test_reservation_keeps_its_number_until_it_is_freed(journal: DecodeJournal, lines: Lines) -> None:
    """Numbers are never used twice; lines of one reservation share one."""
    first, second = make_reservation(), make_reservation()
    for reservation in (first, second):
        journal.reservation_made(reservation)
    journal.local_started(second, (Range(4, 9), Range(0, 9)))
    journal.local_ended(second, "done", 0)
    journal.reservation_published(second)
    journal.reservation_freed(first)
    journal.reservation_freed(second)

    assert [fields["reservation"] for _, fields in lines.kept] == [1, 2, 2, 2, 2, 1, 2]
    assert lines.kept[0][1]["pages"] == [[[0, 2]], [[0, 3]]]
    assert lines.kept[2][1]["required"] == [[4, 9], [0, 9]]


def test_session_that_never_opened_leaves_no_line(journal: DecodeJournal, lines: Lines) -> None:
    """A peer that did not fit held nothing."""
    session = journal.session(SLAB)

    session.closed()
    session.acted(SlabIdle())

    assert lines.kept == []


def test_slot_is_named_by_id_and_generation(session: SessionJournal, lines: Lines) -> None:
    """A lease and its end are about the same generation."""
    slot = Slot(3, 5, 4096, 8192)
    session.slot_leased(slot)
    session.slot_freed(slot)

    leased, freed = (fields for _, fields in lines.kept[1:])
    assert (leased["slot"], leased["generation"], leased["extent"]) == (3, 5, [4096, 12288])
    assert (freed["slot"], freed["generation"]) == (3, 5)


def test_transfer_is_told_from_start_to_drain(
    journal: DecodeJournal, session: SessionJournal, lines: Lines
) -> None:
    """Every line of a transfer names it and both lives; its publication does too."""
    reservation, spans = make_reservation(), make_spans(START)
    journal.reservation_made(reservation)
    lines.kept.clear()

    session.transfer_started(START, reservation, (Range(0, 9),))
    session.acted(ImportSpan(spans[0]))
    session.imported(spans[0])
    session.acted(Send(ReleaseSpan(21, START.attempt, spans[0].sequence)))
    session.refused(spans[1], "KV_CHECKSUM")
    session.received(make_done(START, spans))
    session.acted(TransferComplete(21))
    journal.reservation_published(reservation)
    session.acted(TransferDrained(21))

    assert lines.events == [
        Event.TRANSFER_STARTED,
        Event.SPAN_SUBMITTED,
        Event.SPAN_IMPORTED,
        Event.SPAN_RELEASED,
        Event.SPAN_REFUSED,
        Event.PRODUCER_ENDED,
        Event.TRANSFER_COMPLETED,
        Event.RESERVATION_PUBLISHED,
        Event.TRANSFER_DRAINED,
    ]
    assert all(fields.items() >= NAME.items() for _, fields in lines.kept)
    assert lines.kept[0][1]["pages"] == [[[0, 2]], [[0, 3]]]
    assert lines.kept[5][1]["generation"] == START.generation


def test_end_is_noted_only_of_a_live_transfer(session: SessionJournal, lines: Lines) -> None:
    """A flood of messages about nothing leaves no line."""
    session.received(PrefillCancelled(21, START.attempt))

    assert lines.events == [Event.SESSION_OPENED]


def test_failure_carries_its_reason(journal: DecodeJournal, session: SessionJournal, lines: Lines) -> None:
    """Why a transfer was given up is a code, never a text with values of the request."""
    reservation = make_reservation()
    journal.reservation_made(reservation)
    session.transfer_started(START, reservation, (Range(0, 9),))

    session.acted(TransferFailed(21, Cancelled("by the client")))
    session.received(PrefillCancelled(21, START.attempt))

    assert [fields.get("reason", fields.get("verdict")) for _, fields in lines.kept[-2:]] == [
        "REQUEST_CANCELLED",
        "cancelled",
    ]


def test_journal_that_is_off_takes_everything() -> None:
    """Off, nothing is remembered that only a line needs."""
    session = DecodeJournal().session(SLAB)
    session.acted(TransferComplete(21))
    session.acted(TransferDrained(21))
    session.imported(make_spans(START)[0])
    session.refused(make_spans(START)[0], "KV_CHECKSUM")
    session.closed()
