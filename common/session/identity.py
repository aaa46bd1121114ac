"""Who a peer is: what must be equal on both sides before any KV may cross.

Theory of operation: a `PeerIdentity` is compared field by field by `negotiation.py`; two services that
differ anywhere refuse each other. Weights and tokenizer are compared by content digest, never by path.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.kv.geometry import KVGeometry


class NumericsPolicy(enum.Enum):
    """Whether two services have to compute alike."""

    EXACT = "exact"
    """They have to: the same tokens by every route."""

    DECLARED = "declared"
    """They need not; what differs beside the checkpoint is told."""


class Origin(enum.Enum):
    """How an engine knows its checkpoint."""

    LOADED = "loaded"
    """It read the weights in this process, and the digests were taken of what it read."""

    DECLARED = "declared"
    """It computes with an artefact that was built before; the digests stand in a manifest beside it."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What computes the prompts of a service; told, and never compared."""

    name: str
    origin: Origin = Origin.LOADED
    widths: tuple[int, ...] = ()
    """Tokens that a pass is padded to, ascending; none when any width will do."""

    can_resume: bool = False
    """Whether it can start from KV that it is given."""


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Content digests of a model, as lower-case hex."""

    config: str
    """Digest of the configuration as far as it changes what the model computes."""

    weights: str
    """Digest of every tensor's name, dtype, shape and bytes as it was loaded, whatever files hold them."""

    tokenizer: str
    """Digest of the tokenizer's canonical form, its chat template and its special ids."""

    rounded_weights: str
    """Digest of every tensor's name, shape and values rounded to bfloat16: one for a checkpoint, whatever
    element type it was loaded in."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides the bits of the KV beside the model itself."""

    engine: str
    """What an engine says of itself: library, element type, kernels."""

    chunk_tokens: int
    """Prefill runs on multiples of this many absolute positions; 0 when it runs over the whole prompt."""


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
