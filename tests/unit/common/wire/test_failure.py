"""What a client makes of a status."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import status_pb2  # type: ignore[import-untyped]

from common import errors
from common.wire.failure import DETAILS_KEY, RemoteFailure, from_rpc_error, remote_failure
from common.wire.status import to_status


def make_rpc_error(status: status_pb2.Status, details: bytes | None = None) -> grpc.aio.AioRpcError:
    """Return what a client gets for a status, with other details when they are given."""
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    encoded = details if details is not None else status.SerializeToString()
    trailer = grpc.aio.Metadata((DETAILS_KEY, encoded))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, details=status.message)


def test_refusal_becomes_the_error_that_the_peer_raised() -> None:
    """Decode can name every difference of a session that prefill refused."""
    refusal = errors.LayoutMismatch(
        [errors.Difference("digests", "xxh3-64", "off"), errors.Difference("modes", "stream", "whole")]
    )

    error = from_rpc_error(make_rpc_error(to_status(refusal)))

    assert type(error) is errors.LayoutMismatch
    assert error.differences == refusal.differences


def test_other_statuses_stay_failures_with_their_facts() -> None:
    """An error of the peer is never mistaken for one of this process."""
    error = from_rpc_error(make_rpc_error(to_status(errors.QueueFull(9))))

    assert isinstance(error, RemoteFailure)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.metadata["requested"] == "1"
    assert error.retryable


def test_violations_of_a_request_are_read() -> None:
    """A client can show which field is wrong."""
    violations = (errors.Violation("prompt", "is empty"), errors.Violation("sampling.n", "must be 1"))

    failure = remote_failure(make_rpc_error(to_status(errors.InvalidRequest(violations))))

    assert failure.violations == violations
    assert not failure.retryable


def test_status_of_the_library_has_no_reason() -> None:
    """Codes that grpc makes itself are told apart by the missing reason."""
    status = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="connection refused"
    )

    failure = from_rpc_error(status)

    assert isinstance(failure, RemoteFailure)
    assert (failure.reason, str(failure)) == ("", "UNAVAILABLE: connection refused")


@pytest.mark.parametrize("details", [b"", b"\xff\xff\xff", b"\x1a\x7f"])
def test_unreadable_details_do_not_hide_the_status(details: bytes) -> None:
    """Code and message stand even when the details are damaged."""
    failure = remote_failure(make_rpc_error(to_status(errors.PeerLost("gone")), details))

    assert (failure.code, failure.message, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "gone", "")


def test_refusal_without_differences_stays_a_failure() -> None:
    """A negotiation error has to name what differs; a peer that names nothing gives only its reason."""
    failure = from_rpc_error(make_rpc_error(to_status(errors.ModelMismatch([]))))

    assert isinstance(failure, RemoteFailure)
    assert failure.reason == "MODEL_MISMATCH"
