"""What keeps two services apart where numerics are declared, and what is only told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import ModelMismatch, NegotiationError
from common.kv.geometry import DType
from common.session.identity import NumericsPolicy
from common.session.negotiation import compare, may_differ, negotiate, verify_welcome
from tests.support.factories import make_hybrid_geometry
from tests.support.identities import (
    IDENTITY_CHANGES,
    Change,
    fields_of,
    per_layer,
    with_fingerprint,
    with_geometry,
    with_numerics,
)
from tests.support.sessions import GRANULARITY, NONCE, make_hello, make_identity, make_offer, make_welcome

DECLARED = replace(make_hello(), numerics_policy=NumericsPolicy.DECLARED)

TOLD: dict[str, tuple[Change, set[str]]] = {
    "engine": (with_numerics(engine="npu"), {"numerics.engine"}),
    "dtype": (with_geometry(dtype=DType.BFLOAT16), per_layer("dtype")),
    "weights in another type": (with_fingerprint(weights="3f"), {"fingerprint.weights"}),
}
"""What keeps nobody apart where numerics are declared."""


@pytest.mark.parametrize(("change", "fields"), TOLD.values(), ids=TOLD)
def test_what_may_differ_is_told_where_numerics_are_declared(change: Change, fields: set[str]) -> None:
    """The same peer is refused where they have to be equal."""
    theirs = change(make_identity())

    negotiate(DECLARED, make_offer(theirs))
    verify_welcome(DECLARED, make_welcome(theirs), NONCE)

    assert {one.field for one in may_differ(make_identity(), theirs)} == fields
    assert {one.field for one in compare(make_identity(), theirs)} == fields


ALONE_TOLD = ("engine", "dtype", "weights", "grid")
REFUSED = {name: change for name, change in IDENTITY_CHANGES.items() if name not in ALONE_TOLD}


@pytest.mark.parametrize("change", [change for change, _, _ in REFUSED.values()], ids=REFUSED)
def test_another_model_is_refused_whatever_is_declared(change: Change) -> None:
    """Heads, windows that are too short, vocabulary, config, tokenizer: nobody computes around those."""
    with pytest.raises(NegotiationError):
        negotiate(DECLARED, make_offer(change(make_identity())))


def test_another_checkpoint_is_refused_whatever_is_declared() -> None:
    """Rounded to one type its weights differ too, and the refusal names both digests."""
    theirs = with_fingerprint(weights="3f", rounded_weights="5b")(make_identity())

    with pytest.raises(ModelMismatch) as refused:
        negotiate(DECLARED, make_offer(theirs))

    assert fields_of(refused.value) == {"fingerprint.weights", "fingerprint.rounded_weights"}


@pytest.mark.parametrize(
    ("windows", "is_enough"),
    [((None, None, None), True), ((8, None, 8), True), ((5, None, 5), False), ((6, 9, 6), False)],
)
def test_a_producer_keeps_what_decode_wants_or_more(windows: tuple[int | None, ...], is_enough: bool) -> None:
    """A dense producer has every position of every layer; one that forgets earlier than decode has not."""
    ours = make_identity(make_hybrid_geometry(windows=(6, None, 6), full_head_dim=8))
    layers = tuple(
        replace(layer, window=window) for layer, window in zip(ours.geometry.layers, windows, strict=True)
    )
    theirs = replace(ours, geometry=replace(ours.geometry, layers=layers))

    assert (compare(ours, theirs, NumericsPolicy.DECLARED) == ()) == is_enough


def test_an_own_grid_may_differ_where_numerics_are_declared() -> None:
    """It has to be the grid on which its spans are cut all the same."""
    theirs = with_numerics(chunk_tokens=0)(make_identity())
    offer = replace(make_offer(theirs), granularity=replace(GRANULARITY, chunk_tokens=0))

    negotiate(DECLARED, offer)

    with pytest.raises(ModelMismatch):
        negotiate(DECLARED, replace(offer, granularity=GRANULARITY))
