"""One transfer of the decode service in each of its states, and the ends of its two witnesses."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import Cancelled, ChecksumMismatch, KVSpanError, PeerLost
from common.kv.spans import Span
from common.session.actions import ImportSpan, TransferComplete, TransferDrained, TransferFailed
from common.session.decode_transfer import DecodeTransfer
from common.session.messages import StartPrefill
from common.session.transfer_states import TransferState
from tests.support.factories import make_geometry
from tests.support.sessions import SPANS, START, make_coverage, make_done

DONE = make_done(START, SPANS)
CAUSE = Cancelled("by the client")
DRAINED = TransferDrained(START.transfer_id)


def make_transfer(start: StartPrefill | None = None) -> DecodeTransfer:
    """Return a transfer that holds its reservation and has sent nothing."""
    start = start if start is not None else START
    return DecodeTransfer(start, make_coverage(start), make_geometry().vocab_size)


def make_streaming_transfer(*spans: Span) -> DecodeTransfer:
    """Return an accepted transfer to which these spans were told."""
    transfer = make_transfer()
    transfer.start()
    transfer.accepted()
    for span in spans:
        transfer.span(span)
    return transfer


def make_ending_transfer() -> DecodeTransfer:
    """Return a transfer whose producer is done and whose last copy is under way."""
    transfer = make_streaming_transfer(*SPANS)
    for span in SPANS[:-1]:
        transfer.import_finished(span.sequence)
    transfer.done(DONE)
    return transfer


def make_complete_transfer() -> DecodeTransfer:
    """Return a transfer that waits for publication."""
    transfer = make_ending_transfer()
    transfer.import_finished(5)
    return transfer


def make_published_transfer() -> DecodeTransfer:
    """Return a transfer that ended well."""
    transfer = make_complete_transfer()
    transfer.published()
    return transfer


def make_aborting_transfer() -> DecodeTransfer:
    """Return a transfer that was given up; one copy is under way and the producer has not ended."""
    transfer = make_streaming_transfer(SPANS[0])
    transfer.abort(CAUSE)
    return transfer


def make_ended_transfer() -> DecodeTransfer:
    """Return a transfer that failed and drained."""
    transfer = make_aborting_transfer()
    transfer.import_finished(0)
    transfer.cancelled()
    return transfer


def make_requested_transfer() -> DecodeTransfer:
    """Return a transfer that was sent and not accepted."""
    transfer = make_transfer()
    transfer.start()
    return transfer


IN_STATE: dict[TransferState, Callable[[], DecodeTransfer]] = {
    TransferState.RESERVED: make_transfer,
    TransferState.REQUESTED: make_requested_transfer,
    TransferState.STREAMING: make_streaming_transfer,
    TransferState.ENDING: make_ending_transfer,
    TransferState.COMPLETE: make_complete_transfer,
    TransferState.PUBLISHED: make_published_transfer,
    TransferState.ABORTING: make_aborting_transfer,
    TransferState.ENDED: make_ended_transfer,
}
"""A way into each state."""

ENDS: dict[str, Callable[[DecodeTransfer], object]] = {
    "copy": lambda transfer: transfer.import_finished(0),
    "bad copy": lambda transfer: transfer.import_failed(0, ChecksumMismatch(0, "aa", "bb")),
    "cancelled": lambda transfer: transfer.cancelled(),
    "failed": lambda transfer: transfer.failed("ENGINE_FAILED", "a device was lost"),
    "done": lambda transfer: transfer.done(DONE),
    "lost": lambda transfer: transfer.producer_lost(PeerLost("stream broke")),
}
"""What ends one span's copy or the producer of an aborting transfer."""


def assert_failed(actions: object, kind: type[KVSpanError]) -> None:
    """Check that these actions fail the transfer once, for a reason of exactly this kind."""
    assert isinstance(actions, tuple)
    failures = [action for action in actions if isinstance(action, TransferFailed)]
    assert [type(failure.error) for failure in failures] == [kind], actions
    assert not any(isinstance(action, TransferComplete | ImportSpan) for action in actions)
