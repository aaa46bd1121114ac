"""What an operator asks a decode service: what it is, and what it is doing now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.kv.digest import DigestKind
from common.session.identity import NumericsPolicy, PeerIdentity
from common.session.messages import TransferMode
from common.session.negotiation import PROTOCOL_VERSIONS
from common.telemetry.journal import Journal, NullJournal
from common.wire.convert_counts import calls_to_proto, journal_to_proto
from common.wire.convert_identity import ENGINE, IDENTITY, VERSIONS
from common.wire.enums import DIGESTS, MODES, POLICIES
from common.wire.interceptor import CallStatistics
from decode_service.api.responses import ROUTES
from decode_service.api.validation import RequestLimits
from decode_service.cache.admission import Admission
from decode_service.cache.cache import KVCache
from decode_service.cache.spec import page_bytes
from decode_service.core import DecodeCore
from decode_service.generate.step_loop import StepLoop
from decode_service.prefill.places import Place
from decode_service.prefill.prefill_client import PeerState, PrefillPeer
from kvspan.v1 import decode_pb2 as pb

PEER_STATES = {
    PeerState.CONNECTING: pb.SESSION_STATE_CONNECTING,
    PeerState.GREETING: pb.SESSION_STATE_GREETING,
    PeerState.OPEN: pb.SESSION_STATE_OPEN,
    PeerState.REFUSED: pb.SESSION_STATE_REFUSED,
    PeerState.CLOSED: pb.SESSION_STATE_CLOSED,
    PeerState.LEAVING: pb.SESSION_STATE_LEAVING,
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes in one life of the service."""

    boot_id: str
    identity: PeerIdentity
    limits: RequestLimits
    digests: tuple[DigestKind, ...]
    num_lanes: int
    linears: str
    num_threads: int
    page_tokens: int
    numerics_policy: NumericsPolicy


@dataclass(frozen=True, slots=True)
class Sources:
    """The owners whose counts are reported."""

    core: DecodeCore
    admission: Admission[Place]
    cache: KVCache
    step_loop: StepLoop
    peers: tuple[PrefillPeer, ...]
    journal: Journal | NullJournal
    calls: Callable[[], CallStatistics]


class Reporter:
    """Builds the answers from `statistics()` of the owners."""

    def __init__(self, facts: Facts, sources: Sources) -> None:
        self._facts = facts
        self._sources = sources

    def capabilities(self) -> pb.DecodeServiceGetCapabilitiesResponse:
        """Return what the service is and can."""
        facts = self._facts
        return pb.DecodeServiceGetCapabilitiesResponse(
            versions=VERSIONS.write(PROTOCOL_VERSIONS),
            boot_id=facts.boot_id,
            identity=IDENTITY.write(facts.identity),
            modes=[MODES.number(mode) for mode in TransferMode],
            default_mode=MODES.number(facts.limits.default_mode),
            default_route=ROUTES[facts.limits.default_route],
            routes=[ROUTES[route] for route in facts.limits.routes],
            digests=[DIGESTS.number(kind) for kind in facts.digests],
            num_lanes=facts.num_lanes,
            max_context_tokens=facts.limits.max_context_tokens,
            linears=facts.linears,
            num_threads=facts.num_threads,
            page_tokens=facts.page_tokens,
            numerics_policy=POLICIES.number(facts.numerics_policy),
        )

    def status(self) -> pb.GetStatusResponse:
        """Return what the service is doing now."""
        sources = self._sources
        admission, steps = sources.admission.statistics(), sources.step_loop.statistics()
        counts = sources.core.counts
        return pb.GetStatusResponse(
            boot_id=self._facts.boot_id,
            peers=[_peer(peer) for peer in sources.peers],
            groups=self._groups(),
            reservations=self._reservations(),
            lanes_used=admission.lanes_used,
            lanes_total=admission.num_lanes,
            queue_limit=admission.queue_limit,
            requests=pb.RequestCounts(
                submitted=counts.submitted,
                finished=counts.finished,
                failed=counts.failed,
                cancelled=counts.cancelled,
                refused=counts.refused,
                retried=counts.retried,
                queue_full=admission.num_refused,
            ),
            num_steps=steps.num_steps,
            num_tokens=steps.num_tokens,
            prompts_remote=counts.prompts_remote,
            prompts_local=counts.prompts_local,
            calls=calls_to_proto(sources.calls()),
            journal=journal_to_proto(sources.journal.statistics()),
        )

    def _reservations(self) -> pb.ReservationCounts:
        admission = self._sources.admission.statistics()
        return pb.ReservationCounts(
            queued=admission.num_queued + self._sources.core.counts.reading,
            transferring=admission.num_transferring,
            decoding=admission.num_decoding,
            draining=admission.num_draining,
        )

    def _groups(self) -> list[pb.GroupStatus]:
        geometry = self._facts.identity.geometry
        pools = self._sources.cache.statistics().groups
        return [
            pb.GroupStatus(
                group_index=group.group_index,
                total_pages=pool.total,
                used_pages=pool.total - pool.free,
                page_bytes=page_bytes(group, self._facts.page_tokens),
            )
            for group, pool in zip(geometry.groups, pools, strict=True)
        ]


def _peer(peer: PrefillPeer) -> pb.PeerStatus:
    counts = peer.statistics()
    problem, totals = counts.problem, counts.totals
    return pb.PeerStatus(
        target=counts.target,
        state=PEER_STATES[counts.state],
        boot_id=counts.boot_id,
        problem=problem.text if problem else "",
        reason=problem.reason if problem else "",
        differences=[
            pb.FieldDifference(
                field=one.field, decode_value=one.decode_value, prefill_value=one.prefill_value
            )
            for one in (problem.differences if problem else counts.noted)
        ],
        num_sessions=counts.num_sessions,
        num_transfers=counts.num_transfers,
        slab_leased_bytes=counts.slab_leased_bytes,
        slab_total_bytes=counts.slab_total_bytes,
        num_slots=counts.num_slots,
        num_clock_errors=totals.clock_errors,
        num_late_events=totals.late_events,
        num_unknown_messages=totals.unknown_messages,
        num_duplicate_spans=totals.duplicate_spans,
        engine=ENGINE.write(counts.engine) if counts.engine else None,
    )
