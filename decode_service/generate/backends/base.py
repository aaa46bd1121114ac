"""What the step loop needs from whatever computes a decode step.

A backend reads and extends KV that lies in pages; it knows nothing of requests, reservations or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.kv.geometry import KVGeometry
from decode_service.cache.tables import PageTable


@dataclass(frozen=True, slots=True)
class LaneStep:
    """One lane's part of a step: a token and where its sequence lies."""

    token_id: int

    position: int
    """Absolute position of the token; its KV is written there by the step."""

    tables: tuple[PageTable, ...]
    """One per group; covers what the token sees, and its own position."""


@dataclass(frozen=True, slots=True)
class BackendDescription:
    """What a backend can do, fixed for its life."""

    name: str
    geometry: KVGeometry
    max_lanes: int

    numerics: tuple[str, ...]
    """What decides the bits of the logits."""


class DecodeBackend(Protocol):
    """Computes steps, on one thread at a time."""

    def describe(self) -> BackendDescription:
        """Return what this backend can do."""

    def step(self, batch: Sequence[LaneStep]) -> torch.Tensor:
        """Write the KV of every token into its pages and return the logits [lanes, vocab] in float32.

        A row is a function of its own sequence: not of its neighbours, its place in the batch, or where its
        pages lie. Raises EngineFailed; the KV of the batch's own positions is then undefined, no other is.
        """
