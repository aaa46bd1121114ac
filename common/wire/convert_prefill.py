"""Messages from prefill to decode, to and from their wire form.

Theory of operation: `KVSpan` is the message of the hot path (one per span); its fields are read once each
and its ranges are the only parts that are built.
"""

from __future__ import annotations

from common.kv.spans import Span
from common.session.messages import (
    GoAway,
    GroupTotals,
    Pong,
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillMessage,
    SourceTimings,
    SpanSealed,
    Welcome,
)
from common.wire.convert_identity import (
    granularity_from_proto,
    granularity_to_proto,
    identity_from_proto,
    identity_to_proto,
)
from common.wire.enums import DIGESTS, MODES
from common.wire.fields import (
    MAX_LAYERS,
    MAX_TEXT_CHARS,
    at_least,
    index_range,
    malformed,
    remark,
    require_set,
    require_short,
    text,
)
from kvspan.v1 import transfer_pb2 as pb


def prefill_message_to_proto(message: PrefillMessage) -> pb.TransferResponse:
    """Return the wire form of a message of prefill."""
    match message:
        case SpanSealed(span):
            return pb.TransferResponse(kv_span=_span_to_proto(span))
        case PrefillAccepted(transfer_id, attempt, position):
            accepted = pb.PrefillAccepted(transfer_id=transfer_id, attempt=attempt, queue_position=position)
            return pb.TransferResponse(prefill_accepted=accepted)
        case PrefillDone():
            return pb.TransferResponse(prefill_done=_done_to_proto(message))
        case PrefillFailed(transfer_id, attempt, reason, problem):
            failed = pb.PrefillFailed(
                transfer_id=transfer_id, attempt=attempt, reason=reason, message=problem
            )
            return pb.TransferResponse(prefill_failed=failed)
        case PrefillCancelled(transfer_id, attempt):
            cancelled = pb.PrefillCancelled(transfer_id=transfer_id, attempt=attempt)
            return pb.TransferResponse(prefill_cancelled=cancelled)
        case Pong(number):
            return pb.TransferResponse(pong=pb.Pong(number=number))
        case GoAway(cause):
            return pb.TransferResponse(go_away=pb.GoAway(cause=cause))
        case Welcome():
            return pb.TransferResponse(welcome=_welcome_to_proto(message))


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
        told_ns=span.sealed_ns,
    )


def _done_to_proto(done: PrefillDone) -> pb.PrefillDone:
    return pb.PrefillDone(
        transfer_id=done.transfer_id,
        attempt=done.attempt,
        generation=done.generation,
        totals=[
            pb.GroupTotals(
                group_index=total.group_index,
                num_spans=total.num_spans,
                num_bytes=total.num_bytes,
                layer_tokens=total.layer_tokens,
            )
            for total in done.totals
        ],
        logits=done.logits,
        timings=pb.SourceTimings(
            accepted_ns=done.timings.accepted_ns,
            started_ns=done.timings.started_ns,
            ended_ns=done.timings.ended_ns,
        ),
    )


def _welcome_to_proto(welcome: Welcome) -> pb.Welcome:
    return pb.Welcome(
        version=welcome.version,
        boot_id=welcome.boot_id,
        identity=identity_to_proto(welcome.identity),
        modes=[MODES.number(mode) for mode in welcome.modes],
        digest=DIGESTS.number(welcome.digest),
        granularity=granularity_to_proto(welcome.granularity),
        max_prompt_tokens=welcome.max_prompt_tokens,
        max_concurrency=welcome.max_concurrency,
        can_skip_prefix=welcome.can_skip_prefix,
        nonce=welcome.nonce,
    )


def prefill_message_from_proto(response: pb.TransferResponse) -> PrefillMessage:
    """Return the message that prefill sent.

    Raises: `RemoteProtocolError` when no message is set or a field of it is malformed.
    """
    match response.WhichOneof("message"):
        case "kv_span":
            return SpanSealed(_span_from_proto(response.kv_span))
        case "prefill_accepted":
            accepted = response.prefill_accepted
            attempt = at_least("prefill_accepted.attempt", accepted.attempt, 1)
            return PrefillAccepted(accepted.transfer_id, attempt, accepted.queue_position)
        case "prefill_done":
            return _done_from_proto(response.prefill_done)
        case "prefill_failed":
            failed = response.prefill_failed
            attempt = at_least("prefill_failed.attempt", failed.attempt, 1)
            reason = text("prefill_failed.reason", failed.reason)
            return PrefillFailed(failed.transfer_id, attempt, reason, remark(failed.message))
        case "prefill_cancelled":
            cancelled = response.prefill_cancelled
            attempt = at_least("prefill_cancelled.attempt", cancelled.attempt, 1)
            return PrefillCancelled(cancelled.transfer_id, attempt)
        case "pong":
            return Pong(response.pong.number)
        case "go_away":
            return GoAway(remark(response.go_away.cause))
        case "welcome":
            return _welcome_from_proto(response.welcome)
        case _:
            raise malformed("transfer_response.message", None, "must be set")


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
        at_least("kv_span.written_ns", span.written_ns, 0),
        at_least("kv_span.told_ns", span.told_ns, 0),
    )


def _done_from_proto(done: pb.PrefillDone) -> PrefillDone:
    require_set("prefill_done.timings", done.HasField("timings"))
    require_short("prefill_done.totals", done.totals, MAX_LAYERS)
    timings = done.timings
    return PrefillDone(
        transfer_id=done.transfer_id,
        attempt=at_least("prefill_done.attempt", done.attempt, 1),
        generation=done.generation,
        totals=tuple(
            GroupTotals(
                group_index=total.group_index,
                num_spans=total.num_spans,
                num_bytes=at_least("prefill_done.totals.num_bytes", total.num_bytes, 0),
                layer_tokens=at_least("prefill_done.totals.layer_tokens", total.layer_tokens, 0),
            )
            for total in done.totals
        ),
        logits=done.logits,
        timings=SourceTimings(
            accepted_ns=at_least("prefill_done.timings.accepted_ns", timings.accepted_ns, 0),
            started_ns=at_least("prefill_done.timings.started_ns", timings.started_ns, 0),
            ended_ns=at_least("prefill_done.timings.ended_ns", timings.ended_ns, 0),
        ),
    )


def _welcome_from_proto(welcome: pb.Welcome) -> Welcome:
    require_set("welcome.identity", welcome.HasField("identity"))
    require_set("welcome.granularity", welcome.HasField("granularity"))
    if not welcome.nonce:
        raise malformed("welcome.nonce", welcome.nonce, "must not be empty")
    require_short("welcome.nonce", welcome.nonce, MAX_TEXT_CHARS, "bytes")
    return Welcome(
        version=at_least("welcome.version", welcome.version, 1),
        boot_id=text("welcome.boot_id", welcome.boot_id),
        identity=identity_from_proto("welcome.identity", welcome.identity),
        modes=MODES.offered("welcome.modes", welcome.modes),
        digest=DIGESTS.native("welcome.digest", welcome.digest),
        granularity=granularity_from_proto("welcome.granularity", welcome.granularity),
        max_prompt_tokens=at_least("welcome.max_prompt_tokens", welcome.max_prompt_tokens, 1),
        max_concurrency=at_least("welcome.max_concurrency", welcome.max_concurrency, 1),
        can_skip_prefix=welcome.can_skip_prefix,
        nonce=welcome.nonce,
    )
