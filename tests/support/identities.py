"""Changes of an identity that two services may or may not have, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.errors import GeometryMismatch, ModelMismatch, NegotiationError
from common.kv.geometry import DType
from common.session.identity import PeerIdentity
from tests.support.factories import make_geometry

Change = Callable[[PeerIdentity], PeerIdentity]


def with_geometry(**changes: object) -> Change:
    """Return a change of the shape of all layers."""
    return lambda identity: replace(identity, geometry=make_geometry(**changes))  # type: ignore[arg-type]


def with_fingerprint(**changes: str) -> Change:
    """Return a change of some digests."""
    return lambda identity: replace(identity, fingerprint=replace(identity.fingerprint, **changes))


def with_numerics(**changes: object) -> Change:
    """Return a change of how it computes."""
    return lambda identity: replace(identity, numerics=replace(identity.numerics, **changes))  # type: ignore[arg-type]


def with_rope(value: str) -> Change:
    """Return a change of one key of the config."""
    return lambda identity: replace(identity, config_fields=(("hidden_size", "48"), ("rope_theta", value)))


def with_template(value: str) -> Change:
    """Return a change of the chat template."""
    return lambda identity: replace(identity, tokenizer_fields=(("chat_template", value),))


def per_layer(name: str, num_layers: int = 2) -> set[str]:
    """Return the names of a field of every layer."""
    return {f"geometry.layers[{index}].{name}" for index in range(num_layers)}


IDENTITY_CHANGES: dict[str, tuple[Change, set[str], type[NegotiationError]]] = {
    "dtype": (with_geometry(dtype=DType.FLOAT16), per_layer("dtype"), GeometryMismatch),
    "heads": (with_geometry(num_kv_heads=6), per_layer("num_kv_heads"), GeometryMismatch),
    "dim": (with_geometry(head_dim=16), per_layer("head_dim"), GeometryMismatch),
    "window": (with_geometry(window=6), per_layer("window"), GeometryMismatch),
    "vocabulary": (with_geometry(vocab_size=12), {"geometry.vocab_size"}, GeometryMismatch),
    "config": (with_fingerprint(config="c1"), {"fingerprint.config"}, ModelMismatch),
    "weights": (with_fingerprint(weights="3f"), {"fingerprint.weights"}, ModelMismatch),
    "tokenizer": (with_fingerprint(tokenizer="71"), {"fingerprint.tokenizer"}, ModelMismatch),
    "template": (with_template('"other"'), {"tokenizer.chat_template"}, ModelMismatch),
    "rope": (with_rope("500000.0"), {"config.rope_theta"}, ModelMismatch),
    "engine": (with_numerics(engine="npu"), {"numerics.engine"}, ModelMismatch),
    "grid": (
        with_numerics(chunk_tokens=4),
        {"numerics.chunk_tokens", "granularity.chunk_tokens"},
        ModelMismatch,
    ),
}


"""By name: the change, the fields that a refusal names, and its kind."""


def fields_of(error: NegotiationError) -> set[str]:
    """Return the fields that a refusal names."""
    return {difference.field for difference in error.differences}
