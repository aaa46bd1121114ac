"""What is said and counted of the transfers of one session."""

import logging
from dataclasses import replace

import pytest

from common.errors import LeaseExpired
from common.excerpt import SHOWN_CHARS
from common.session.actions import Enqueue, Send
from common.session.messages import CancelPrefill, PrefillCancelled, PrefillDone, PrefillFailed, SpanSealed
from prefill_service.totals import Totals
from prefill_service.transfer_log import TransferLog
from tests.support.sessions import TIMINGS, make_logits, make_spans, make_start, make_totals

START = replace(make_start(21), request_id="7f-000012")
NAMES = {"request_id": "7f-000012", "session": 3, "transfer_id": 21}
SPANS = make_spans(START)
NUM_BYTES = sum(span.length for span in SPANS)
DONE = PrefillDone(21, 1, 3, make_totals(SPANS), make_logits(), TIMINGS)

Line = tuple[str, str, dict[str, object]]


class Desk:
    """A log of session 3, and what it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.totals = Totals()
        self.log = TransferLog(3, self.totals)
        self._caplog = caplog

    def accept(self) -> None:
        """Have transfer 21 accepted, and forget the line."""
        self.log.received(START)
        self.log.acted(Enqueue(START))
        self._caplog.clear()

    def lines(self) -> list[Line]:
        """Return level, event and fields of each line."""
        return [(one.levelname, one.msg, vars(one)["fields"]) for one in self._caplog.records]

    def counted(self) -> dict[str, int]:
        """Return the counts that are not 0."""
        counts = {name: getattr(self.totals, name) for name in Totals.__slots__ if name != "ignored"}
        return {name: count for name, count in counts.items() if count}


@pytest.fixture
def desk(caplog: pytest.LogCaptureFixture) -> Desk:
    """Return a log of a session without transfers."""
    return Desk(caplog)


def test_an_accepted_transfer_is_named_as_decode_names_it(desk: Desk) -> None:
    """By request and transfer; and how much it asks for."""
    desk.log.received(START)
    desk.log.acted(Enqueue(START))

    size = {"mode": "stream", "tokens": 5, "slot_bytes": 8192}
    assert desk.lines() == [("INFO", "transfer.accepted", NAMES | size)]
    assert (desk.counted(), desk.log.num_live) == ({"accepted": 1}, 1)


def test_a_request_id_of_a_peer_is_cut_and_steers_no_terminal(desk: Desk) -> None:
    """It is somebody else's text."""
    start = replace(START, request_id="\x1b[2J" + "x" * 10_000)

    desk.log.received(start)
    desk.log.acted(Enqueue(start))

    (said,) = [fields["request_id"] for _, _, fields in desk.lines()]
    assert str(said).startswith("[2Jxxx")
    assert len(str(said)) == SHOWN_CHARS


def test_the_start_of_a_transfer_says_how_long_it_was_queued(desk: Desk) -> None:
    """In seconds."""
    desk.accept()

    desk.log.started(21, 2_345_678_901)

    assert desk.lines() == [("INFO", "transfer.started", NAMES | {"queued_s": 2.346})]


def test_a_finished_transfer_says_what_was_sealed(desk: Desk) -> None:
    """One line, and none for a span."""
    desk.accept()

    for span in SPANS:
        desk.log.acted(Send(SpanSealed(span)))
    desk.log.acted(Send(DONE))

    size = {"spans": len(SPANS), "bytes": NUM_BYTES}
    assert desk.lines() == [("INFO", "transfer.done", NAMES | size)]
    sealed = {"sealed_spans": len(SPANS), "sealed_bytes": NUM_BYTES}
    assert desk.counted() == {"accepted": 1, "done": 1, **sealed}


@pytest.mark.parametrize(("reason", "count"), [("ENGINE_FAILED", "failed"), (LeaseExpired.code, "expired")])
def test_a_failed_transfer_says_why(desk: Desk, reason: str, count: str) -> None:
    """Time and credit that ran out are counted apart."""
    desk.accept()

    desk.log.acted(Send(PrefillFailed(21, 1, reason, "for people")))

    why = {"reason": reason, "problem": "for people"}
    assert desk.lines() == [("WARNING", "transfer.failed", NAMES | why)]
    assert desk.counted() == {"accepted": 1, count: 1}


def test_a_cancel_is_said_when_it_comes_and_when_it_is_done(desk: Desk) -> None:
    """Bytes may move in between; the cause is a peer's word."""
    desk.accept()

    desk.log.received(CancelPrefill(21, 1, "DEADLINE\nEXCEEDED"))
    desk.log.acted(Send(PrefillCancelled(21, 1)))

    assert desk.lines() == [
        ("INFO", "cancel.received", NAMES | {"cause": "DEADLINEEXCEEDED"}),
        ("INFO", "transfer.cancelled", NAMES),
    ]
    assert desk.counted() == {"accepted": 1, "cancelled": 1}


def test_a_cancel_of_nothing_is_not_said(desk: Desk) -> None:
    """It came too late, or is wrong; the session counts it."""
    desk.log.received(CancelPrefill(21, 1, "REQUEST_CANCELLED"))

    assert desk.lines() == []


def test_a_refused_start_is_named_and_was_never_accepted(desk: Desk) -> None:
    """Also when the transfer before it goes on."""
    desk.accept()
    desk.log.received(replace(make_start(22), request_id="7f-000013"))

    desk.log.acted(Send(PrefillFailed(22, 1, "START_REFUSED", "slot [0, 5)")))

    names = {"request_id": "7f-000013", "session": 3, "transfer_id": 22}
    why = {"reason": "START_REFUSED", "problem": "slot [0, 5)"}
    assert desk.lines() == [("WARNING", "transfer.refused", names | why)]
    assert (desk.counted(), desk.log.num_live) == ({"accepted": 1, "refused": 1}, 1)


def test_transfers_of_a_session_that_ends_are_abandoned(desk: Desk) -> None:
    """Each is said once, however often the session ends."""
    desk.accept()

    desk.log.closed()
    desk.log.closed()

    assert desk.lines() == [("INFO", "transfer.abandoned", NAMES)]
    assert (desk.counted(), desk.log.num_live) == ({"accepted": 1, "abandoned": 1}, 0)
