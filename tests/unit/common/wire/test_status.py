"""What a caller sees of each error."""

from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from common import errors
from common.wire.failure import FailureDetails, RemoteFailure
from common.wire.status import to_status

HEADER_LIMIT = 8192
"""What a peer with default settings takes of headers, in bytes."""


def details_of(status: status_pb2.Status) -> dict[str, Message]:
    """Return the details of a status by the name of their type."""
    found = {}
    for packed in status.details:
        name = packed.TypeName().rpartition(".")[2]
        assert name not in found, f"{name} is there twice"
        found[name] = vars(error_details_pb2)[name].FromString(packed.value)
    return found


def header_bytes(status: status_pb2.Status) -> int:
    """Return what a status takes of the headers: the message, and the details in base64."""
    return len(quote(status.message)) + len(status.SerializeToString()) * 4 // 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SlabNotShared([errors.Difference("nonce", "a", "b")]), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.RemoteProtocolError("no hello"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.LocalProtocolError("no hello"), grpc.StatusCode.INTERNAL),
        (errors.PagesExhausted(1, 7, 3), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.ChecksumMismatch(4, "aa", "bb"), grpc.StatusCode.DATA_LOSS),
        (errors.PrefillFailed("START_REFUSED", "x"), grpc.StatusCode.INTERNAL),
        (errors.PrefillEngineFailed("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.PeerLost("gone"), grpc.StatusCode.UNAVAILABLE),
        (errors.LeaseExpired("late"), grpc.StatusCode.ABORTED),
        (errors.PromptTooLong("max_context_tokens", 9, 8), grpc.StatusCode.OUT_OF_RANGE),
        (errors.UnknownModel("a", "b"), grpc.StatusCode.NOT_FOUND),
        (errors.Cancelled("client left"), grpc.StatusCode.CANCELLED),
        (errors.InvariantViolation("page 3 has two owners"), grpc.StatusCode.INTERNAL),
        (ValueError("x"), grpc.StatusCode.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_error_has_the_code_that_says_what_to_do(error: Exception, code: grpc.StatusCode) -> None:
    """The code answers whether to retry, to change the request or to fix a service."""
    assert to_status(error).code == code.value[0]


def test_every_error_carries_its_reason_and_facts() -> None:
    """A program reads the reason and the facts; the text is for people."""
    info = details_of(to_status(errors.ChecksumMismatch(4, "aa", "bb")))["ErrorInfo"]

    assert info == error_details_pb2.ErrorInfo(
        reason="KV_CHECKSUM", domain="kvspan", metadata={"sequence": "4", "expected": "aa", "actual": "bb"}
    )


def test_refusal_lists_every_difference() -> None:
    """One violation per differing field, with both values."""
    error = errors.GeometryMismatch(
        [errors.Difference("page_tokens", "4", "8"), errors.Difference("layers[1].head_dim", "16", "24")]
    )

    refusal = details_of(to_status(error))["PreconditionFailure"]

    assert [(v.type, v.subject, v.description) for v in refusal.violations] == [  # type: ignore[attr-defined]
        ("KV_GEOMETRY_MISMATCH", "page_tokens", "decode 4, prefill 8"),
        ("KV_GEOMETRY_MISMATCH", "layers[1].head_dim", "decode 16, prefill 24"),
    ]


def test_invalid_request_lists_every_violation() -> None:
    """A client can mend all fields at once."""
    error = errors.InvalidRequest(
        [errors.Violation("sampling.top_p", "must be in (0, 1]"), errors.Violation("prompt", "is empty")]
    )

    request = details_of(to_status(error))["BadRequest"]

    assert [(v.field, v.description) for v in request.field_violations] == [  # type: ignore[attr-defined]
        ("sampling.top_p", "must be in (0, 1]"),
        ("prompt", "is empty"),
    ]


def test_full_service_says_when_to_retry_and_what_is_full() -> None:
    """A capacity error names the resource with its numbers, and a delay."""
    details = details_of(to_status(errors.SlabExhausted(640, 128)))

    assert sorted(details) == ["ErrorInfo", "ResourceInfo", "RetryInfo"]
    assert details["ResourceInfo"].description == "640 requested, 128 free"  # type: ignore[attr-defined]
    assert details["RetryInfo"].retry_delay.seconds >= 1  # type: ignore[attr-defined]


def test_lost_kv_is_not_offered_for_retry() -> None:
    """Only errors that may pass by themselves carry a delay."""
    assert "RetryInfo" not in details_of(to_status(errors.ChecksumMismatch(4, "aa", "bb")))


def test_missing_session_tells_why_the_peers_do_not_fit() -> None:
    """The cause stands beside the reason, and each difference as in the refusal itself."""
    difference = errors.Difference("slab.socket", "made one", "cannot open it")
    error = errors.PeerUnavailable("no session", cause="SLAB_NOT_SHARED", differences=[difference])

    details = details_of(to_status(error))

    assert details["ErrorInfo"].reason == "PREFILL_UNAVAILABLE"  # type: ignore[attr-defined]
    assert details["ErrorInfo"].metadata["cause"] == "SLAB_NOT_SHARED"  # type: ignore[attr-defined]
    (violation,) = details["PreconditionFailure"].violations  # type: ignore[attr-defined]
    assert (violation.type, violation.subject) == ("SLAB_NOT_SHARED", "slab.socket")
    assert violation.description == "decode made one, prefill cannot open it"


def test_status_names_the_request_that_it_ends() -> None:
    """A client that got no token has a name to search the logs for all the same."""
    info = details_of(to_status(errors.QueueFull(9), "5e3a90b1-000007"))["ErrorInfo"]

    assert info.metadata["request_id"] == "5e3a90b1-000007"  # type: ignore[attr-defined]


def test_unexpected_error_tells_its_type_only() -> None:
    """The text of an unknown exception may hold a prompt."""
    status = to_status(ValueError("The secret prompt"))

    assert status.message == "unexpected ValueError"
    assert "secret" not in str(status)


def test_failure_of_another_service_is_passed_on() -> None:
    """A service between two others neither loses the reason nor invents one."""
    details = FailureDetails(
        "PREFILL_UNAVAILABLE",
        {"problem": "down"},
        violations=(errors.Violation("prompt", "is empty"),),
        retry_after_s=3.0,
    )

    status = to_status(RemoteFailure(grpc.StatusCode.UNAVAILABLE, "no peer", details))

    found = details_of(status)
    assert (status.code, status.message) == (grpc.StatusCode.UNAVAILABLE.value[0], "no peer")
    assert found["ErrorInfo"].reason == "PREFILL_UNAVAILABLE"  # type: ignore[attr-defined]
    assert sorted(found) == ["BadRequest", "ErrorInfo", "RetryInfo"]


@pytest.mark.parametrize(
    "error",
    [
        errors.GeometryMismatch([errors.Difference(f"f{i}", "é" * 500, "1" * 500) for i in range(700)]),
        errors.InvalidRequest([errors.Violation("x" * 500, "\n" * 500) for _ in range(700)]),
        errors.CoverageIncomplete([f"group 0 layer {i}: [0, 4096)" for i in range(700)]),
        errors.PrefillFailed("\ud800" * 3000, "𝄞" * 3000),
    ],
    ids=lambda error: type(error).__name__,
)
def test_status_fits_into_the_headers_of_any_peer(error: errors.KVSpanError) -> None:
    """A status that is too large would reach the client as another error, without its reason."""
    status = to_status(error)

    assert header_bytes(status) < HEADER_LIMIT
    assert details_of(status)["ErrorInfo"].reason == error.code  # type: ignore[attr-defined]


def test_refusal_says_how_many_differences_it_left_out() -> None:
    """A list that was cut never looks complete."""
    error = errors.GeometryMismatch([errors.Difference(f"f{i}", "1" * 500, "2") for i in range(700)])

    violations = details_of(to_status(error))["PreconditionFailure"].violations  # type: ignore[attr-defined]

    assert violations[-1].description == f"{700 - (len(violations) - 1)} more"
