"""The seam between a prefill engine and whatever takes its KV.

An engine calls `write` once per chunk and KV-owning layer, in model order inside a chunk and chunk after
chunk. Implementations: `prefill_service/span_writer.py` packs into a slot,
`decode_service/prefill/page_writer.py` into reserved pages (route local).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.kv.ranges import Range

Rows = NDArray[np.generic]
"""Keys or values of some tokens: [tokens, KV heads, row_bytes / KV heads of raw bytes], any item size."""


class KVWriter(Protocol):
    """Takes finished KV; the arrays must not change after the call."""

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Take the KV of one model layer for the absolute positions `tokens`.

        Called on the engine's thread. May keep references to the arrays until the prefill ends.
        """
