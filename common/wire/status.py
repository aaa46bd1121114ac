"""What a caller sees of an error: its gRPC code and details.

Theory of operation: `CODES` maps every leaf of `common/errors.py` to a code; `to_status` adds exactly one
`ErrorInfo` (reason, domain, facts) and, as they apply, `PreconditionFailure`, `BadRequest`, `RetryInfo` and
`ResourceInfo`, each at most once (AIP-193). Codes follow one question, what the caller should do:

    FAILED_PRECONDITION   fix or restart a service first: configuration, negotiation, a peer that broke
                          the rules (it would do so again)
    RESOURCE_EXHAUSTED    the same call later
    UNAVAILABLE           the same call later, or elsewhere
    ABORTED               the same request from its start
    INVALID_ARGUMENT, OUT_OF_RANGE, NOT_FOUND   change the request
    DATA_LOSS             the KV that arrived is not what was computed; nothing of it was used
    INTERNAL              read the logs of the service

A status travels in response headers, which peers limit to 8 KiB: text and facts are cut and differences
left out, with their number, so that it always arrives.

Not here: reading a status (`failure.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from common import errors
from common.excerpt import excerpt
from common.telemetry.logging import request_of_call
from common.wire.failure import DOMAIN, RemoteFailure

MAX_MESSAGE_BYTES = 1024
"""Of the message after percent encoding; it travels twice: as a header of its own and in the details."""

MAX_FACT_CHARS = 200
"""Of one value of the metadata, one side of a difference or one problem of a request."""

MAX_DETAIL_BYTES = 1800
"""Of each of the two details whose length is open: facts, and differences or violations."""

RETRY_AFTER_S = 1
"""Told to clients with every retryable error; transfers and requests end within about this time."""

MAX_REASON_CHARS = 63
"""Limit of ErrorInfo.reason (AIP-193)."""

INTERNAL_REASON = "INTERNAL_ERROR"
"""Reason of an exception that nobody raised on purpose."""

INVARIANT_REASON = "INVARIANT_VIOLATED"

LISTED_ELSEWHERE = frozenset({"differences", "violations"})
"""Facts that have a detail of their own and are left out of the metadata."""

CODES: Mapping[type[Exception], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.GeometryMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SlabNotShared: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LocalProtocolError: grpc.StatusCode.INTERNAL,
    errors.RemoteProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SlabExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PagesExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CallsExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StaleGeneration: grpc.StatusCode.DATA_LOSS,
    errors.SpanOutOfRange: grpc.StatusCode.DATA_LOSS,
    errors.SpanOverlap: grpc.StatusCode.DATA_LOSS,
    errors.ChecksumMismatch: grpc.StatusCode.DATA_LOSS,
    errors.CoverageIncomplete: grpc.StatusCode.DATA_LOSS,
    errors.TotalsMismatch: grpc.StatusCode.DATA_LOSS,
    errors.LogitsInvalid: grpc.StatusCode.DATA_LOSS,
    errors.PrefillFailed: grpc.StatusCode.INTERNAL,
    errors.PeerLost: grpc.StatusCode.UNAVAILABLE,
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.PrefillEngineFailed: grpc.StatusCode.UNAVAILABLE,
    errors.LeaseExpired: grpc.StatusCode.ABORTED,
    errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PromptTooLong: grpc.StatusCode.OUT_OF_RANGE,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.EngineFailed: grpc.StatusCode.INTERNAL,
    errors.InvariantViolation: grpc.StatusCode.INTERNAL,
}


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the code of an error; INTERNAL when it has no entry."""
    if isinstance(error, RemoteFailure):
        return error.code
    return next((CODES[cls] for cls in type(error).__mro__ if cls in CODES), grpc.StatusCode.INTERNAL)


def to_status(error: BaseException, request_id: str = "") -> status_pb2.Status:
    """Return the status of an error, small enough for any peer; it names the request, if there is one.

    Of an exception that nobody raised on purpose only the type is told: its text may hold a prompt.
    """
    result = status_pb2.Status(code=code_of(error).value[0], message=_fit_message(_message(error)))
    for detail in _details(error, request_id):
        result.details.add().Pack(detail)
    return result


def set_status(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """Give the call of a handler the status of `error`, which it ends with when the handler returns.

    `context.abort` would raise an exception that the call keeps: every frame of the handler in its traceback,
    and so the request, would live until the collector finds them.
    """
    status = rpc_status.to_status(to_status(error, request_of_call.get()))
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(status.trailing_metadata)


def _message(error: BaseException) -> str:
    match error:
        case errors.KVSpanError() | errors.InvariantViolation():
            return str(error)
        case RemoteFailure():
            return error.message
        case _:
            return f"unexpected {type(error).__name__}"


def _details(error: BaseException, request_id: str) -> list[Message]:
    match error:
        case RemoteFailure():
            reason, facts = error.reason or INTERNAL_REASON, error.metadata
            listed = _precondition_failure(reason, error.differences), _bad_request(error.violations)
        case errors.NegotiationError():
            reason, facts = error.code, error.metadata()
            listed = _precondition_failure(reason, error.differences), None
        case errors.PeerUnavailable():
            reason, facts = error.code, error.metadata()
            listed = _precondition_failure(error.cause, error.differences), None
        case errors.InvalidRequest():
            reason, facts = error.code, error.metadata()
            listed = None, _bad_request(error.violations)
        case errors.KVSpanError():
            reason, facts, listed = error.code, error.metadata(), (None, None)
        case _:
            reason = INVARIANT_REASON if isinstance(error, errors.InvariantViolation) else INTERNAL_REASON
            facts, listed = {}, (None, None)
    facts = {"request_id": request_id, **facts} if request_id else facts
    info = error_details_pb2.ErrorInfo(
        reason=reason[:MAX_REASON_CHARS], domain=DOMAIN, metadata=_fit_facts(facts)
    )
    parts: list[Message | None] = [info, *listed, _retry_info(error), _resource_info(error)]
    return [part for part in parts if part is not None]


def _precondition_failure(
    reason: str, differences: Sequence[errors.Difference]
) -> error_details_pb2.PreconditionFailure | None:
    """Return one violation per difference, as many as fit, and the number of the others."""
    result = error_details_pb2.PreconditionFailure()
    for index, difference in enumerate(differences):
        ours, theirs = _cut(difference.decode_value), _cut(difference.prefill_value)
        result.violations.add(
            type=reason, subject=_cut(difference.field), description=f"decode {ours}, prefill {theirs}"
        )
        if result.ByteSize() > MAX_DETAIL_BYTES:
            del result.violations[-1]
            result.violations.add(type="OMITTED", description=f"{len(differences) - index} more")
            break
    return result if differences else None


def _bad_request(violations: Sequence[errors.Violation]) -> error_details_pb2.BadRequest | None:
    result = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        result.field_violations.add(field=_cut(violation.field), description=_cut(violation.problem))
        if result.ByteSize() > MAX_DETAIL_BYTES:
            del result.field_violations[-1]
            result.field_violations.add(description=f"{len(violations) - index} more")
            break
    return result if violations else None


def _retry_info(error: BaseException) -> error_details_pb2.RetryInfo | None:
    if isinstance(error, errors.KVSpanError | RemoteFailure) and error.retryable:
        return error_details_pb2.RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S))
    return None


def _resource_info(error: BaseException) -> error_details_pb2.ResourceInfo | None:
    if isinstance(error, errors.CapacityError):
        return error_details_pb2.ResourceInfo(
            resource_type=error.unit, description=f"{error.requested} requested, {error.free} free"
        )
    return None


def _fit_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the facts that fit, in order, and the number of the others as `omitted`."""
    kept: dict[str, str] = {}
    size = 0
    wanted = {name: _cut(value) for name, value in facts.items() if name not in LISTED_ELSEWHERE}
    for name, value in wanted.items():
        size += len(name) + len(value.encode()) + 8
        if size > MAX_DETAIL_BYTES:
            return {**kept, "omitted": str(len(wanted) - len(kept))}
        kept[name] = value
    return kept


def _cut(value: str) -> str:
    """Return a text of at most MAX_FACT_CHARS characters that protobuf can carry."""
    return excerpt(value.encode(errors="replace").decode(), MAX_FACT_CHARS)


def _fit_message(message: str) -> str:
    """Return the longest start of a message that fits after percent encoding."""
    kept = message.encode(errors="replace").decode()[:MAX_MESSAGE_BYTES]
    if kept == message and len(quote(kept)) <= MAX_MESSAGE_BYTES:
        return message
    while len(quote(kept)) > MAX_MESSAGE_BYTES - len(quote("…")):
        kept = kept[: len(kept) * 7 // 8]
    return kept + "…"
