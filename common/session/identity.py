"""Who a peer is: what must be equal on both sides before any KV may cross.

Theory of operation: a `PeerIdentity` is compared field by field by `negotiation.py`; two services that
differ anywhere refuse each other. Weights and tokenizer are compared by content digest, never by path.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.geometry import KVGeometry


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Content digests of a model, as lower-case hex."""

    config: str
    """Digest of the configuration as far as it changes what the model computes."""

    weights: str
    """Digest of every tensor's name, dtype, shape and bytes, whatever files hold them."""

    tokenizer: str
    """Digest of the tokenizer's canonical form, its chat template and its special ids."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides the bits of the KV beside the model itself."""

    engine: str
    """Family of the prefill engine, for example `torch-cpu`."""

    chunk_tokens: int
    """Prefill runs on multiples of this many absolute positions."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Everything that `negotiation.compare` holds against the other side."""

    model_name: str
    """For people only; never compared."""

    fingerprint: ModelFingerprint

    config_fields: tuple[tuple[str, str], ...]
    """Canonical JSON of each top-level configuration key, sorted, so that a difference can be named."""

    geometry: KVGeometry
    numerics: Numerics

    tokenizer_fields: tuple[tuple[str, str], ...] = ()
    """The same of each part of the tokenizer, its chat template among them."""
