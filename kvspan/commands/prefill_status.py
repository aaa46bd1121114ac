"""What a prefill service is doing now, for `kvspan status` and for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvspan.commands.check import CALL_TIME_LIMIT_S
from kvspan.commands.counts import own_lines
from kvspan.commands.remote import call_prefill
from kvspan.commands.values import rounded_size

if TYPE_CHECKING:
    from kvspan.v1.transfer_pb2 import IgnoredCounts, PrefillServiceGetStatusResponse, RunningPrefill


def ask_prefill_status(target: str) -> PrefillServiceGetStatusResponse:
    """Return the status of the prefill service at `target`. Raises: `RemoteFailure`."""
    from kvspan.v1.transfer_pb2 import PrefillServiceGetStatusRequest

    request = PrefillServiceGetStatusRequest()
    answer: PrefillServiceGetStatusResponse = call_prefill(
        target, lambda stub: stub.GetStatus(request, timeout=CALL_TIME_LIMIT_S)
    )
    return answer


def prefill_status_lines(status: PrefillServiceGetStatusResponse) -> Iterator[str]:
    """Yield the status: service, engine, counts since start, then one line per session."""
    totals = status.totals
    yield f"prefill, boot {status.boot_id}: {len(status.sessions)} sessions, {status.num_queued} queued"
    yield f"engine: {_running(status.running) if status.HasField('running') else 'idle'}"
    yield (
        f"transfers: {totals.accepted} accepted, {totals.done} done, {totals.failed} failed, "
        f"{totals.cancelled} cancelled, {totals.expired} expired, {totals.abandoned} abandoned; "
        f"{totals.refused} refused"
    )
    yield f"sealed: {totals.sealed_spans} spans, {rounded_size(totals.sealed_bytes)}"
    yield f"sessions: {totals.sessions_opened} opened, {totals.sessions_ended} ended"
    yield f"ignored: {_ignored(totals.ignored)}"
    yield from _session_lines(status)
    yield from own_lines(status)


def _running(running: RunningPrefill) -> str:
    name = f"request {running.request_id} (session {running.session}, transfer {running.transfer_id})"
    run_s = running.run_time.ToTimedelta().total_seconds()
    doing = "computing"
    if running.HasField("wait_time"):
        doing = f"waiting for credit for {running.wait_time.ToTimedelta().total_seconds():.1f} s"
    return f"{name}, {running.num_tokens} tokens, {doing}, {run_s:.1f} s in all"


def _ignored(counts: IgnoredCounts) -> str:
    return (
        f"{counts.unknown_messages} unknown messages, {counts.repeated_starts} repeated starts, "
        f"{counts.ignored_releases} releases, {counts.dropped_spans} dropped spans"
    )


def _session_lines(status: PrefillServiceGetStatusResponse) -> Iterator[str]:
    from kvspan.v1.transfer_pb2 import PrefillSessionState

    for one in status.sessions:
        state = PrefillSessionState.Name(one.state).removeprefix("PREFILL_SESSION_STATE_").lower()
        slab = f"{rounded_size(one.pinned_bytes)} of {rounded_size(one.slab_bytes)} pinned"
        jobs = f"{one.num_queued} queued, {one.num_running} running, {one.num_sealed_spans} spans to release"
        last = ", goes last" if one.goes_last else ""
        yield f"session {one.session}, boot {one.peer_boot_id or '?'}: {state}, {jobs}, {slab}{last}"
