"""What both services count of themselves, as their status tells it."""

from __future__ import annotations

from common.telemetry.journal import JournalStatistics
from common.wire.interceptor import CallStatistics
from kvspan.v1 import transfer_pb2 as pb


def calls_to_proto(calls: CallStatistics) -> pb.CallCounts:
    """Return the calls that were refused unread or broke, since start."""
    return pb.CallCounts(exhausted=calls.num_exhausted, broken=calls.num_broken)


def journal_to_proto(written: JournalStatistics | None) -> pb.JournalStatus | None:
    """Return what this life has written; None when the journal is off."""
    if written is None:
        return None
    return pb.JournalStatus(num_lines=written.num_lines, num_bytes=written.num_bytes, is_lost=written.is_lost)
