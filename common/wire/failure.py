"""A status that came back from a call, as an exception with typed facts.

Theory of operation: `from_rpc_error` reads the details that `status.py` writes. A refusal of negotiation
becomes the same error the peer raised, with its differences, so that decode can name it; every other
status stays a `RemoteFailure`. Statuses made by the grpc library itself carry no reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from common import errors

DOMAIN = "kvspan"
"""ErrorInfo.domain of every error that kvspan raises on purpose."""

DETAILS_KEY = "grpc-status-details-bin"
"""Key under which grpc carries a google.rpc.Status."""

NANOSECONDS = 10**9

Detail = TypeVar("Detail", bound=Message)

NEGOTIATION_ERRORS: Mapping[str, type[errors.NegotiationError]] = {
    cls.code: cls
    for cls in (
        errors.VersionMismatch,
        errors.ModelMismatch,
        errors.GeometryMismatch,
        errors.LayoutMismatch,
        errors.SlabNotShared,
    )
}


@dataclass(frozen=True, slots=True)
class FailureDetails:
    """What a status says beside its code and message."""

    reason: str = ""
    """UPPER_SNAKE code of the error; empty when the library made the status."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """Typed facts of the error as texts."""

    differences: tuple[errors.Difference, ...] = ()
    """What two peers disagree on; the last one may say how many were left out."""

    violations: tuple[errors.Violation, ...] = ()
    """What is wrong with the request."""

    retry_after_s: float | None = None
    """Seconds after which the same call may succeed; None when the peer does not say."""


class RemoteFailure(Exception):
    """The other side of a call, or the way to it, ended the call with a status that is not OK."""

    def __init__(self, code: grpc.StatusCode, message: str, details: FailureDetails) -> None:
        self.code = code
        self.message = message
        self.reason = details.reason
        self.metadata = dict(details.metadata)
        self.differences = details.differences
        self.violations = details.violations
        self.retry_after_s = details.retry_after_s
        super().__init__(": ".join(part for part in (code.name, details.reason, message) if part))

    @property
    def retryable(self) -> bool:
        """Whether the peer said that the same call may succeed later."""
        return self.retry_after_s is not None


def from_rpc_error(error: grpc.RpcError) -> errors.NegotiationError | RemoteFailure:
    """Return what a failed call means, from a synchronous or an asyncio client."""
    failure = remote_failure(error)
    refusal = NEGOTIATION_ERRORS.get(failure.reason)
    return refusal(failure.differences) if refusal and failure.differences else failure


@contextmanager
def remote_failures() -> Iterator[None]:
    """Raise the `RemoteFailure` of a call inside the block that did not end with OK."""
    try:
        yield
    except grpc.RpcError as error:
        raise remote_failure(error) from error


def remote_failure(error: grpc.RpcError) -> RemoteFailure:
    """Return a failed call as an exception with typed facts, never as an error of this process."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return RemoteFailure(grpc.StatusCode.UNKNOWN, str(error), FailureDetails())
    code, message = error.code(), error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return RemoteFailure(code, message, _read_details(value))
    return RemoteFailure(code, message, FailureDetails())


def _read_details(encoded: bytes) -> FailureDetails:
    """Return the details of a status; those of an unreadable one are empty."""
    try:
        status = status_pb2.Status.FromString(encoded)
        info = _unpack(status, error_details_pb2.ErrorInfo())
        refusal = _unpack(status, error_details_pb2.PreconditionFailure())
        request = _unpack(status, error_details_pb2.BadRequest())
        retry = _unpack(status, error_details_pb2.RetryInfo())
    except DecodeError:
        return FailureDetails()
    return FailureDetails(
        reason=info.reason if info else "",
        metadata=dict(info.metadata) if info else {},
        differences=tuple(map(_difference, refusal.violations)) if refusal else (),
        violations=tuple(errors.Violation(v.field, v.description) for v in request.field_violations)
        if request
        else (),
        retry_after_s=retry.retry_delay.seconds + retry.retry_delay.nanos / NANOSECONDS if retry else None,
    )


def _unpack(status: status_pb2.Status, detail: Detail) -> Detail | None:
    return next((detail for packed in status.details if packed.Unpack(detail)), None)


def _difference(violation: error_details_pb2.PreconditionFailure.Violation) -> errors.Difference:
    """Return the difference that a violation describes as "decode X, prefill Y"."""
    ours, _, theirs = violation.description.removeprefix("decode ").partition(", prefill ")
    return errors.Difference(violation.subject or violation.type, ours, theirs)
