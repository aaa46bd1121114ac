"""Which checkpoint an engine or a backend computes with, however it came by the weights.

Not here: who a service is towards a peer, which adds its numerics (`common/session/identity.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.geometry import KVGeometry
from common.session.identity import ModelFingerprint, Origin


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The checkpoint of an engine or a backend."""

    model_name: str
    """For people only; never compared."""

    fingerprint: ModelFingerprint

    config_fields: tuple[tuple[str, str], ...]
    """Canonical JSON of each top-level configuration key, sorted, so that a difference can be named."""

    tokenizer_fields: tuple[tuple[str, str], ...]
    """The same of each part of the tokenizer; an engine needs none itself, prompts arrive as ids."""

    geometry: KVGeometry
    """KV that the engine delivers, or that the backend stores."""

    origin: Origin = Origin.LOADED
