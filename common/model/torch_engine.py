"""Prefill with transformers' own modules, chunk by chunk, as an engine.

Not here: the computing itself (`forward/prefill.py`). The decode service uses this engine for its local route
too; the same code on both sides is what makes their KV equal.
"""

from __future__ import annotations

from collections.abc import Callable

from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription, Logits, Wanted
from common.kv.writer import KVWriter
from common.model.forward.prefill import ChunkedPrefill


class TorchEngine:
    """A `PrefillEngine` over a model that `ChunkedPrefill` can run."""

    def __init__(
        self, prefill: ChunkedPrefill, identity: EngineIdentity, numerics: tuple[str, ...], kernels: str = ""
    ) -> None:
        self._prefill = prefill
        self._identity = identity
        self._description = EngineDescription(
            name="torch",
            numerics=numerics,
            max_prompt_tokens=prefill.max_prompt_tokens,
            chunk_tokens=prefill.chunk_tokens,
            kernels=kernels,
        )

    def identity(self) -> EngineIdentity:
        """See `PrefillEngine`."""
        return self._identity

    def describe(self) -> EngineDescription:
        """See `PrefillEngine`."""
        return self._description

    def prefill(
        self,
        token_ids: list[int],
        wanted: Wanted,
        writer: KVWriter,
        is_cancelled: Callable[[], bool],
    ) -> Logits:
        """See `PrefillEngine`."""
        return self._prefill.prefill(token_ids, wanted, writer, is_cancelled)
