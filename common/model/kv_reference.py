"""Keys, values and logits of a prompt as transformers computes them in float32, to compare engines with.

Theory of operation: one forward over the whole prompt with the library's own cache, which keeps of a windowed
layer the last positions only.

Ownership: one thread; the model in it has its own attention and linears.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.prefill import Logits
from common.model.loader import load_model


class KVReference:
    """A model as its library has it."""

    def __init__(self, spec: str) -> None:
        """Load it; raises as `load_model` does."""
        loaded = load_model(spec, "float32", progress=False)
        self._model = loaded.model
        self._layers = [layer.layer_index for layer in loaded.geometry.layers]
        self.rounded_weights = loaded.fingerprint.rounded_weights
        """See `ModelFingerprint`."""

    def prefill(self, token_ids: list[int]) -> tuple[dict[int, NDArray[np.float32]], Logits]:
        """Return keys and values [2, tokens kept, KV heads, head size] by layer, and the last logits."""
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([token_ids]), use_cache=True, logits_to_keep=1)
        held = {
            layer: torch.stack((output.cache.layers[layer].keys[0], output.cache.layers[layer].values[0]))
            for layer in self._layers
        }
        rows = {layer: both.transpose(1, 2).float().numpy() for layer, both in held.items()}
        return rows, output.logits[0, -1].float().numpy()
