"""The demo model through the engine: a real one, of thirty layers, in float32.

Skipped where it was not unpacked; `make demo-openvino` does that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from kvspan_openvino.convert import tolerance
from kvspan_openvino.factory import create_engine

from common.engine.setup import EngineSetup
from common.kv.ranges import Range
from common.model.folder.cache import cache_folder, demo_checkpoint
from common.model.loader import load_model

UNPACKED = demo_checkpoint(cache_folder(os.environ))
"""Looked for before the tests get a cache of their own."""


# Converting it takes a minute, several where other work has the cores.
@pytest.mark.timeout(900)
@pytest.mark.skipif(UNPACKED is None, reason="the demo model was not unpacked")
def test_kv_and_logits_of_a_real_model_are_those_of_transformers(
    kvspan_cache: Path, make_setup: Callable[..., EngineSetup]
) -> None:
    """At both ends of both widths, within rounding, and the same next token; layers come in order."""
    assert UNPACKED is not None
    (kvspan_cache / UNPACKED.name).symlink_to(UNPACKED)
    engine = create_engine(make_setup("demo", "widths=96,256", "parts=3"))
    loaded = load_model("demo", "float32", False)
    assert engine.describe().layer_stops == (10, 20)

    for length in (1, 96, 97, 256):
        ids = [(5 + 7919 * index) % 49_000 for index in range(length)]
        with torch.inference_mode():
            output = loaded.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        rows = Taken()
        logits = engine.prefill(ids, {layer: Range(0, length) for layer in range(30)}, rows, lambda: False)

        assert rows.layers == list(range(30))
        pairs = [(logits, output.logits[0, -1].numpy())]
        for layer, ours in zip(output.cache.layers, rows.rows, strict=True):
            theirs = (layer.keys[0].transpose(0, 1).numpy(), layer.values[0].transpose(0, 1).numpy())
            pairs += list(zip(ours, theirs, strict=True))
        for found, expected in pairs:
            bound = tolerance(loaded, float(np.abs(expected).max()))
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
        assert int(logits.argmax()) == int(output.logits[0, -1].argmax())


class Taken:
    """A writer that keeps what it is given, which stays as it is until the next prompt."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []

    def write(self, layer_index: int, _tokens: Range, keys: np.ndarray, values: np.ndarray) -> None:
        """Keep it."""
        self.layers.append(layer_index)
        self.rows.append((keys, values))
