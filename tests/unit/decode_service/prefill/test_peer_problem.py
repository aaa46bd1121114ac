"""What operators, logs and clients are told of a peer without a session."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from common.errors import Difference, GeometryMismatch, PeerLost, PeerUnavailable, SlabNotShared
from common.wire.failure import FailureDetails, RemoteFailure
from decode_service.prefill.peer_problem import (
    MAX_DIFFERENCES,
    PeerProblem,
    problem_of,
    silence_of,
    unavailable,
)

PAGES = Difference("geometry.vocab_size", "64", "32")
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
    assert problem.text == "peers do not fit: geometry.vocab_size: decode 64, prefill 32"


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
    assert "geometry.vocab_size: decode 64, prefill 32" in str(error)


def test_a_client_is_told_no_address() -> None:
    """Where the services of a host talk to each other is no business of a client."""
    error = unavailable([problem_of(unreachable("/run/private/prefill.sock"))])

    assert str(error) == "no prefill service is connected (UNAVAILABLE)"
    assert "/run" not in str(error.metadata())


def test_a_service_without_peers_says_so() -> None:
    """There is nothing to wait for then."""
    assert str(unavailable([])) == "no prefill service is connected (none is configured)"


@pytest.mark.parametrize(
    ("name", "may_write", "said"),
    [
        ("socket", False, "its socket belongs to uid {owner}, this is uid 12345; run both as one user"),
        ("socket", True, "it does not answer"),
        ("none", False, "it does not answer"),
    ],
)
def test_a_socket_of_another_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, may_write: bool, said: str
) -> None:
    """To whoever runs both services it looks like a prefill service that is down."""
    (tmp_path / "socket").touch()
    monkeypatch.setattr(os, "access", lambda *_: may_write)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    assert silence_of(f"unix:{tmp_path / name}") == said.format(owner=tmp_path.stat().st_uid)
