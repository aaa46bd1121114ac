"""The one moment at which pages become readable."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ChecksumMismatch, CoverageIncomplete, InvariantViolation, PeerLost
from decode_service.cache.cache import KVCache
from decode_service.cache.reservation import Holder, Reservation, ReservationState
from decode_service.publication import publish
from tests.support.decoding import GEOMETRY, ProvenPrefill, logits_of, make_answer, make_request

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("common", "decode_service", "kvspan", "prefill_service")
REQUEST = make_request()


def make_reservation() -> Reservation:
    """Return pages that client and producer hold."""
    pages = KVCache(GEOMETRY, (5,)).reserve(REQUEST.prompt_len, 4)
    reservation = Reservation(pages, lambda freed: None)
    reservation.hold(Holder.PRODUCER)
    return reservation


def test_a_proven_prefill_becomes_a_sequence_that_holds_its_pages() -> None:
    """Readable, held for the step loop, and the slab bytes may go."""
    reservation, prefill = make_reservation(), ProvenPrefill(logits_of(ord("x")))

    sequence = publish(reservation, prefill, make_answer(REQUEST), REQUEST.prompt_len)

    assert reservation.state is ReservationState.PUBLISHED
    assert reservation.holders == {Holder.PRODUCER, Holder.LANE}, "a slow reader holds no lane"
    assert prefill.num_settled == 1
    assert sequence.first().text == "x"
    assert sequence.lane_step().position == REQUEST.prompt_len


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("the stream broke"),
        ChecksumMismatch(3, "aa", "bb"),
        CoverageIncomplete(["group 0 layers 1 tokens [0, 3)"]),
        InvariantViolation("streaming, not complete"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_nothing_is_visible_when_the_proof_fails(error: Exception) -> None:
    """Fail closed: no state, no holder and no slab byte changed."""
    reservation, prefill = make_reservation(), ProvenPrefill(logits_of(65), error)

    with pytest.raises(type(error)):
        publish(reservation, prefill, make_answer(REQUEST), REQUEST.prompt_len)

    assert reservation.state is ReservationState.RESERVED
    assert reservation.holders == {Holder.CLIENT, Holder.PRODUCER}
    assert prefill.num_settled == 0


def test_pages_are_published_once() -> None:
    """A second sequence over the same pages would write into the first."""
    reservation, prefill = make_reservation(), ProvenPrefill(logits_of(65))
    publish(reservation, prefill, make_answer(REQUEST), REQUEST.prompt_len)

    with pytest.raises(InvariantViolation):
        publish(reservation, prefill, make_answer(REQUEST), REQUEST.prompt_len)

    assert prefill.num_settled == 1


def callers_of(name: str) -> Iterator[str]:
    """Yield every source file that calls a function, method or class of this name."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                    yield path.relative_to(ROOT).as_posix()


def test_one_place_marks_pages_readable() -> None:
    """Rule 2: publication happens in one place in the code."""
    assert [*callers_of("mark_published")] == ["decode_service/publication.py"]


def test_one_place_makes_what_the_step_loop_can_run() -> None:
    """Before its publication there is nothing that the step loop could run (W5)."""
    assert [*callers_of("Sequence")] == ["decode_service/publication.py"]
