"""The messages of a session to and from their wire form: the one door the services use.

Theory of operation: one table per message says which field is which attribute and what it may hold. What
no correct peer sends raises `RemoteProtocolError` with the name and the value of the field; what a correct
message means is decided by the machines in `common/session`. `KVSpan` and `ReleaseSpan` cross once per span
and are written out: their fields are read once each, and only the ranges of a span are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from common.kv.spans import Span
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    GoAway,
    GroupTotals,
    Hello,
    Ping,
    Pong,
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillMessage,
    ReleaseSpan,
    SlabHandle,
    SourceTimings,
    SpanSealed,
    StartPrefill,
    Welcome,
)
from common.session.negotiation import PrefillOffer
from common.wire.convert_identity import FACTS, GRANULARITY, IDENTITY, VERSIONS
from common.wire.enums import DIGESTS, LAYOUTS, MODES, POLICIES, layout_name, policy_of
from common.wire.fields import (
    MAX_CHOICES,
    MAX_LAYERS,
    MAX_TEXT_CHARS,
    MAX_TOKENS,
    at_least,
    index_range,
    malformed,
    require_set,
    require_short,
)
from common.wire.tables import (
    COUNT,
    DURATION,
    INDEX,
    PLAIN,
    REMARK,
    TEXT,
    Field,
    Table,
    list_of,
    offer,
    one_of,
)
from kvspan.v1 import transfer_pb2 as pb


def _socket_name(path: str, name: str) -> str:
    """Return a name that stays inside its directory; one of version 1 has none, and hears of that first."""
    require_short(path, name, MAX_TEXT_CHARS, "characters")
    if "/" in name or "\0" in name or name in (".", ".."):
        raise malformed(path, name, "must be a file name without a directory")
    return name


def _nonce(path: str, nonce: bytes) -> bytes:
    if not nonce:
        raise malformed(path, nonce, "must not be empty")
    require_short(path, nonce, MAX_TEXT_CHARS, "bytes")
    return nonce


def _tokens(path: str, ids: Sequence[int]) -> tuple[int, ...]:
    require_short(path, ids, MAX_TOKENS, "tokens")
    return tuple(ids)


LAYOUT = Field(layout_name, LAYOUTS.number)

SLAB = Table(
    pb.SlabHandle,
    SlabHandle,
    socket=Field(_socket_name).named("name"),
    size_bytes=COUNT,
    layout=LAYOUT,
)

HELLO = Table(
    pb.Hello,
    Hello,
    versions=VERSIONS.as_part(),
    boot_id=TEXT,
    identity=IDENTITY.as_part(),
    modes=offer(MODES),
    digests=offer(DIGESTS),
    slab=SLAB.as_part(),
    numerics_policy=Field(policy_of, POLICIES.number),
)

START = Table(
    pb.StartPrefill,
    StartPrefill,
    transfer_id=PLAIN,
    attempt=COUNT,
    slot_id=PLAIN,
    generation=PLAIN,
    slot_offset=INDEX,
    slot_size=INDEX,
    token_ids=Field(_tokens),
    first_tokens=list_of(PLAIN, MAX_LAYERS),
    mode=one_of(MODES),
    time_limit=DURATION.named("time_limit_s"),
    request_id=REMARK,
)

WELCOME = Table(
    pb.Welcome,
    Welcome,
    version=COUNT,
    boot_id=TEXT,
    identity=IDENTITY.as_part(),
    modes=offer(MODES),
    digest=one_of(DIGESTS),
    granularity=GRANULARITY.as_part(),
    max_prompt_tokens=COUNT,
    max_concurrency=COUNT,
    engine=FACTS,
    nonce=Field(_nonce),
    longest_step_ms=PLAIN,
)

TOTALS = Table(
    pb.GroupTotals, GroupTotals, group_index=PLAIN, num_spans=PLAIN, num_bytes=INDEX, layer_tokens=INDEX
)

# Times may be anything, or missing, which reads as zero: `PeerTimes` says which can be true, and no wrong one
# costs a transfer.
TIMINGS = Table(pb.SourceTimings, SourceTimings, accepted_ns=PLAIN, started_ns=PLAIN, ended_ns=PLAIN)

DONE = Table(
    pb.PrefillDone,
    PrefillDone,
    transfer_id=PLAIN,
    attempt=COUNT,
    generation=PLAIN,
    totals=list_of(TOTALS.as_part(), MAX_LAYERS),
    logits=PLAIN,
    timings=Field(TIMINGS.read, TIMINGS.write),
)

REQUESTS: dict[str, Table[Any, Any]] = {
    "hello": HELLO,
    "start_prefill": START,
    "cancel_prefill": Table(pb.CancelPrefill, CancelPrefill, transfer_id=PLAIN, attempt=COUNT, cause=REMARK),
    "ping": Table(pb.Ping, Ping, number=PLAIN),
}
"""What decode sends, but for `ReleaseSpan`."""

RESPONSES: dict[str, Table[Any, Any]] = {
    "welcome": WELCOME,
    "prefill_accepted": Table(
        pb.PrefillAccepted, PrefillAccepted, transfer_id=PLAIN, attempt=COUNT, queue_position=PLAIN
    ),
    "prefill_done": DONE,
    "prefill_failed": Table(
        pb.PrefillFailed, PrefillFailed, transfer_id=PLAIN, attempt=COUNT, reason=TEXT, message=REMARK
    ),
    "prefill_cancelled": Table(pb.PrefillCancelled, PrefillCancelled, transfer_id=PLAIN, attempt=COUNT),
    "pong": Table(pb.Pong, Pong, number=PLAIN),
    "go_away": Table(pb.GoAway, GoAway, cause=REMARK),
}
"""What prefill sends, but for `KVSpan`."""

OFFER = Table(
    pb.PrefillServiceGetCapabilitiesResponse,
    PrefillOffer,
    versions=VERSIONS.as_part(),
    boot_id=TEXT,
    identity=IDENTITY.as_part(),
    modes=offer(MODES),
    digests=offer(DIGESTS),
    layouts=list_of(LAYOUT, MAX_CHOICES),
    granularity=GRANULARITY.as_part(),
    max_prompt_tokens=COUNT,
    max_concurrency=COUNT,
    engine=FACTS,
    longest_step_ms=PLAIN,
)

_ENVELOPES = {
    table.native: (envelope, name, table)
    for envelope, tables in ((pb.TransferRequest, REQUESTS), (pb.TransferResponse, RESPONSES))
    for name, table in tables.items()
}


@overload
def to_proto(message: DecodeMessage) -> pb.TransferRequest: ...
@overload
def to_proto(message: PrefillMessage) -> pb.TransferResponse: ...
def to_proto(message: DecodeMessage | PrefillMessage) -> pb.TransferRequest | pb.TransferResponse:
    """Return the wire form of a message of either side."""
    if isinstance(message, SpanSealed):
        return pb.TransferResponse(kv_span=_span_to_proto(message.span))
    if isinstance(message, ReleaseSpan):
        release = pb.ReleaseSpan(
            transfer_id=message.transfer_id, attempt=message.attempt, sequence=message.sequence
        )
        return pb.TransferRequest(release_span=release)
    envelope, name, table = _ENVELOPES[type(message)]
    return envelope(**{name: table.write(message)})


def decode_message_from_proto(request: pb.TransferRequest) -> DecodeMessage:
    """Return the message that decode sent.

    Raises: `RemoteProtocolError` when no message is set or a field of it is malformed.
    """
    name = request.WhichOneof("message")
    if name == "release_span":
        release = request.release_span
        attempt = at_least("release_span.attempt", release.attempt, 1)
        return ReleaseSpan(release.transfer_id, attempt, release.sequence)
    require_set("transfer_request.message", name is not None)
    message: DecodeMessage = REQUESTS[str(name)].read(str(name), getattr(request, str(name)))
    return message


def prefill_message_from_proto(response: pb.TransferResponse) -> PrefillMessage:
    """Return the message that prefill sent.

    Raises: `RemoteProtocolError` when no message is set or a field of it is malformed.
    """
    name = response.WhichOneof("message")
    if name == "kv_span":
        return SpanSealed(_span_from_proto(response.kv_span))
    require_set("transfer_response.message", name is not None)
    message: PrefillMessage = RESPONSES[str(name)].read(str(name), getattr(response, str(name)))
    return message


def capabilities_to_proto(
    offer: PrefillOffer, *, linears: str, num_threads: int
) -> pb.PrefillServiceGetCapabilitiesResponse:
    """Return the answer of a prefill service to GetCapabilities."""
    capabilities = OFFER.write(offer)
    capabilities.linears, capabilities.num_threads = linears, num_threads
    return capabilities


def capabilities_from_proto(capabilities: pb.PrefillServiceGetCapabilitiesResponse) -> PrefillOffer:
    """Return what a prefill service offers.

    Raises: `RemoteProtocolError` when a part is missing or malformed.
    """
    return OFFER.read("capabilities", capabilities)


def _span_to_proto(span: Span) -> pb.KVSpan:
    return pb.KVSpan(
        transfer_id=span.transfer_id,
        attempt=span.attempt,
        slot_id=span.slot_id,
        generation=span.generation,
        sequence=span.sequence,
        group_index=span.group_index,
        layers={"start": span.layers.start, "stop": span.layers.stop},
        tokens={"start": span.tokens.start, "stop": span.tokens.stop},
        offset=span.offset,
        length=span.length,
        digest=span.digest,
        written_ns=span.written_ns,
        sealed_ns=span.sealed_ns,
    )


def _span_from_proto(span: pb.KVSpan) -> Span:
    require_set("kv_span.layers", span.HasField("layers"))
    require_set("kv_span.tokens", span.HasField("tokens"))
    require_short("kv_span.digest", span.digest, MAX_TEXT_CHARS, "bytes")
    return Span(
        span.transfer_id,
        at_least("kv_span.attempt", span.attempt, 1),
        span.slot_id,
        span.generation,
        span.sequence,
        span.group_index,
        index_range("kv_span.layers", span.layers),
        index_range("kv_span.tokens", span.tokens),
        at_least("kv_span.offset", span.offset, 0),
        at_least("kv_span.length", span.length, 0),
        span.digest,
        span.written_ns,
        span.sealed_ns,
    )
