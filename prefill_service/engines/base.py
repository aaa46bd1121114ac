"""What the prefill service needs from whatever computes a prompt.

The engines that are built in are in this package. An engine is called from one thread, one prompt at a
time, and need not be re-entrant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.kv.geometry import KVGeometry
from common.kv.writer import KVWriter


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine computes, fixed for its life."""

    name: str
    geometry: KVGeometry

    chunk_tokens: int
    """Grid of absolute positions on which it computes; a multiple of a page."""

    max_prompt_tokens: int

    numerics: tuple[str, ...]
    """What decides the bits of its KV, compared between the two services."""

    longest_step_ms: int = 0
    """Longest time it cannot be stopped within; 0 when it asks `is_cancelled` at every layer."""


class PrefillEngine(Protocol):
    """Computes prompts."""

    def describe(self) -> EngineDescription:
        """Return what this engine computes."""

    def prefill(
        self,
        token_ids: Sequence[int],
        first_token: int,
        writer: KVWriter,
        is_cancelled: Callable[[], bool],
    ) -> NDArray[np.float32]:
        """Write the KV of positions [first_token, prompt length) and return the last logits [vocab].

        Calls `writer` once per chunk and KV-owning layer as soon as that KV is final, and `is_cancelled` at
        least once per layer, or every `longest_step_ms`. Raises Cancelled when told so, EngineError when it
        cannot, and whatever the writer raises; the engine then serves the next prompt as if nothing had been.
        """
