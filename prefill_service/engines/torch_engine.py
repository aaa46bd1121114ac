"""Prefill with transformers' own modules, chunk by chunk.

Not here: the computing itself (`common/model/forward/prefill.py`), which the decode service uses for its
local route too; the same code on both sides is what makes their KV equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.kv.geometry import KVGeometry
from common.kv.writer import KVWriter
from common.model.forward.prefill import ChunkedPrefill
from prefill_service.engines.base import EngineDescription


class TorchEngine:
    """A `PrefillEngine` over a model that `ChunkedPrefill` can run."""

    def __init__(self, prefill: ChunkedPrefill, geometry: KVGeometry, numerics: tuple[str, ...]) -> None:
        self._prefill = prefill
        self._description = EngineDescription(
            name="torch",
            geometry=geometry,
            chunk_tokens=prefill.chunk_tokens,
            max_prompt_tokens=prefill.max_prompt_tokens,
            numerics=numerics,
        )

    def describe(self) -> EngineDescription:
        """Return what this engine computes."""
        return self._description

    def prefill(
        self,
        token_ids: Sequence[int],
        first_token: int,
        writer: KVWriter,
        is_cancelled: Callable[[], bool],
    ) -> NDArray[np.float32]:
        """Write the KV of positions [first_token, prompt length) and return the last logits [vocab]."""
        return self._prefill.prefill(token_ids, first_token, writer, is_cancelled)
