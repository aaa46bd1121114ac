"""An engine without a model: patterned KV of any shape at a given pace, to measure hand-overs of any size.

Theory of operation: each layer "computes" for `layer_ms`, by waiting, and then makes its rows at the speed of
memory; it delivers layer by layer. The backend `replay` of decode knows the pattern and checks it on arrival.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription, Logits, Wanted
from common.engine.replay import PATTERN, Pattern, next_token, read_shape
from common.engine.setup import EngineSetup
from common.errors import Cancelled, PromptTooLong
from common.kv.writer import KVWriter

MAX_LAYER_MS = 60_000


def make_engine(setup: EngineSetup) -> ReplayEngine:
    """Return the engine `replay`; options: those of the shape, and layer_ms."""
    identity = read_shape(setup.options)
    layer_ms = setup.options.number("layer_ms", 0.0, maximum=MAX_LAYER_MS)
    setup.options.close()
    return ReplayEngine(identity, setup.max_prompt_tokens, layer_ms)


class ReplayEngine:
    """A `PrefillEngine` that computes nothing."""

    def __init__(self, identity: EngineIdentity, max_prompt_tokens: int, layer_ms: float = 0.0) -> None:
        self._identity = identity
        self._layer_s = layer_ms / 1e3
        self._patterns = {group.group_index: Pattern(group) for group in identity.geometry.groups}
        self._description = EngineDescription(
            name="replay",
            numerics=(PATTERN,),
            max_prompt_tokens=max_prompt_tokens,
            chunk_tokens=None,
            longest_step_ms=math.ceil(layer_ms),
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
        limit = self._description.max_prompt_tokens
        if len(token_ids) > limit:
            raise PromptTooLong("prompt tokens", len(token_ids), limit)
        for layer, (group, _) in self._identity.geometry.by_layer.items():
            if is_cancelled():
                raise Cancelled("prefill was cancelled")
            time.sleep(self._layer_s)
            if tokens := wanted[layer]:
                keys, values = (
                    self._patterns[group.group_index].rows(layer, kind, tokens) for kind in (0, 1)
                )
                writer.write(layer, tokens, keys, values)
        return next_token(token_ids, self._identity.geometry.vocab_size)
