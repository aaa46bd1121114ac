"""What an operator asks a prefill service: what it is doing now, and what it has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from google.protobuf.duration_pb2 import Duration

from common.excerpt import printable
from common.session.prefill_side import PrefillSessionStatistics
from common.session.prefill_states import PrefillState
from common.wire.convert_counts import calls_to_proto, journal_to_proto
from common.wire.fields import duration
from common.wire.interceptor import CallStatistics
from kvspan.v1 import transfer_pb2 as pb
from prefill_service.decode_peer import DecodePeer, PeerContext
from prefill_service.job import Job
from prefill_service.totals import Totals

STATES = {
    PrefillState.WAITING: pb.PREFILL_SESSION_STATE_WAITING,
    PrefillState.ATTACHING: pb.PREFILL_SESSION_STATE_ATTACHING,
    PrefillState.OPEN: pb.PREFILL_SESSION_STATE_OPEN,
    PrefillState.LEAVING: pb.PREFILL_SESSION_STATE_LEAVING,
    PrefillState.CLOSED: pb.PREFILL_SESSION_STATE_CLOSED,
}


def status_to_proto(
    context: PeerContext, peers: Sequence[DecodePeer], running: Job | None, calls: CallStatistics
) -> pb.PrefillServiceGetStatusResponse:
    """Return what the service is doing now; on the event loop."""
    return pb.PrefillServiceGetStatusResponse(
        boot_id=context.offer.boot_id,
        sessions=[_session(peer, context) for peer in peers],
        num_queued=len(context.queue),
        running=None if running is None else _running(running, context.clock.now_ns()),
        totals=_totals(context.totals, [peer.statistics() for peer in peers]),
        calls=calls_to_proto(calls),
        journal=journal_to_proto(context.journal.statistics()),
    )


def _session(peer: DecodePeer, context: PeerContext) -> pb.PrefillSessionStatus:
    counts = peer.statistics()
    return pb.PrefillSessionStatus(
        session=peer.number,
        peer_boot_id=counts.peer_boot_id,
        state=STATES[counts.state],
        slab_bytes=peer.slab_bytes,
        pinned_bytes=counts.pinned_bytes,
        num_queued=counts.num_queued,
        num_running=counts.num_jobs - counts.num_queued,
        num_sealed_spans=counts.sealed_spans,
        goes_last=context.queue.is_last(peer.number),
        ignored=pb.IgnoredCounts(**asdict(counts.ignored)),
    )


def _running(job: Job, now_ns: int) -> pb.RunningPrefill:
    start = job.target.start
    since_ns = job.ring.statistics().waiting_since_ns if job.ring is not None else None
    is_waiting = since_ns is not None
    return pb.RunningPrefill(
        request_id=printable(start.request_id),
        session=job.owner.number,
        transfer_id=start.transfer_id,
        num_tokens=len(start.token_ids),
        phase=pb.PREFILL_PHASE_WAITING_FOR_CREDIT if is_waiting else pb.PREFILL_PHASE_COMPUTING,
        # It has no start yet in the moment before its thread begins.
        run_time=_since(job.started_ns or now_ns, now_ns),
        wait_time=None if since_ns is None else _since(since_ns, now_ns),
    )


def _since(start_ns: int, now_ns: int) -> Duration:
    # The engine's thread may have begun just after we looked at the clock.
    return duration(max(0, now_ns - start_ns) / 1e9)


def _totals(totals: Totals, live: Sequence[PrefillSessionStatistics]) -> pb.PrefillTotals:
    return pb.PrefillTotals(
        sessions_opened=totals.sessions_opened,
        sessions_ended=totals.sessions_ended,
        accepted=totals.accepted,
        done=totals.done,
        failed=totals.failed,
        cancelled=totals.cancelled,
        expired=totals.expired,
        abandoned=totals.abandoned,
        refused=totals.refused,
        sealed_spans=totals.sealed_spans,
        sealed_bytes=totals.sealed_bytes,
        ignored=pb.IgnoredCounts(**asdict(sum((one.ignored for one in live), totals.ignored))),
    )
