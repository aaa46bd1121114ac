"""What operators, logs and clients are told of a peer without a session."""

from __future__ import annotations

import grpc

from common.errors import Difference, GeometryMismatch, PeerLost, PeerUnavailable, SlabNotShared
from common.wire.failure import FailureDetails, RemoteFailure
from decode_service.prefill.peer_problem import MAX_DIFFERENCES, PeerProblem, problem_of, unavailable

PAGES = Difference("geometry.page_tokens", "64", "32")
NO_FILE = Difference("slab.socket", "made one", "cannot open it in --slab-dir: No such file or directory")


def unreachable(path: str) -> RemoteFailure:
    """Return what the library says of a socket where nobody listens."""
    return RemoteFailure(grpc.StatusCode.UNAVAILABLE, f"failed to connect: unix:{path}", FailureDetails())


def test_a_problem_is_known_again_by_reason_and_differences() -> None:
    """Texts hold what differs from try to try, so they tell nothing apart."""
    assert PeerProblem("CONFIG_INVALID", "7 bytes free") == PeerProblem("CONFIG_INVALID", "9 bytes free")
    assert problem_of(SlabNotShared([NO_FILE])) != problem_of(SlabNotShared([PAGES]))
    assert problem_of(PeerLost("x")) != problem_of(PeerUnavailable("x"))


def test_a_refusal_keeps_its_reason_and_its_differences() -> None:
    """An operator sees the same as whoever compares the two services."""
    problem = problem_of(GeometryMismatch([PAGES]))

    assert problem == PeerProblem("KV_GEOMETRY_MISMATCH", "", (PAGES,))
    assert problem.text == "peers do not fit: geometry.page_tokens: decode 64, prefill 32"


def test_a_peer_cannot_make_a_problem_long() -> None:
    """Number and length of the values are the peer's choice, and all of them travel in a status."""
    differences = [Difference(f"f{number}", "a" * 5000, "b" * 5000) for number in range(700)]

    problem = problem_of(GeometryMismatch(differences))

    assert len(problem.differences) == MAX_DIFFERENCES
    assert max(len(one.decode_value) + len(one.prefill_value) for one in problem.differences) <= 400


def test_a_peer_steers_no_terminal() -> None:
    """Its words are printed by `kvspan status`, line by line."""
    failure = RemoteFailure(grpc.StatusCode.UNAVAILABLE, "a\x1b[2J\nb", FailureDetails(reason="X\x1bY"))

    problem = problem_of(failure)

    assert (problem.reason, problem.text) == ("XY", "UNAVAILABLE: XY: a[2Jb")


def test_a_status_without_a_reason_is_known_by_its_code() -> None:
    """Those that the library makes."""
    assert problem_of(unreachable("/run/p")).reason == "UNAVAILABLE"


def test_a_client_is_told_the_reason_of_every_peer_and_all_differences() -> None:
    """Whoever reads the status of a request knows what to change without a look into the services."""
    problems = [problem_of(SlabNotShared([NO_FILE])), problem_of(GeometryMismatch([PAGES]))]

    error = unavailable([*problems, problems[0]])

    assert error.cause == "SLAB_NOT_SHARED, KV_GEOMETRY_MISMATCH"
    assert error.differences == (NO_FILE, PAGES)
    assert str(error).count("slab.socket: decode made one, prefill cannot open it") == 1
    assert "geometry.page_tokens: decode 64, prefill 32" in str(error)


def test_a_client_is_told_no_address() -> None:
    """Where the services of a host talk to each other is no business of a client."""
    error = unavailable([problem_of(unreachable("/run/private/prefill.sock"))])

    assert str(error) == "no prefill service is connected (UNAVAILABLE)"
    assert "/run" not in str(error.metadata())


def test_a_service_without_peers_says_so() -> None:
    """There is nothing to wait for then."""
    assert str(unavailable([])) == "no prefill service is connected (none is configured)"
