"""An engine and a backend of somebody else, as `--engine-factory` and `--backend-factory` find them.

They compute nothing: KV is a pattern, and the next token the number above the last one.
"""

from __future__ import annotations

from common.engine.setup import BackendSetup, EngineSetup
from common.kv.geometry import DType, KVGeometry, LayerGeometry
from tests.support.fakes import CountingBackend, PatternEngine

VOCAB_SIZE = 259
"""Of the tokenizer of the tiny models."""


def geometry() -> KVGeometry:
    """Return three layers, the second with a window."""
    layers = (
        LayerGeometry(0, 2, 8, DType.FLOAT32, None),
        LayerGeometry(1, 2, 8, DType.FLOAT32, 12),
        LayerGeometry(2, 2, 8, DType.FLOAT32, None),
    )
    return KVGeometry(layers, VOCAB_SIZE)


def make_engine(setup: EngineSetup) -> PatternEngine:
    """Return an engine on the grid of the service; `limit` is its longest prompt."""
    limit = setup.options.integer("limit", 64, minimum=1)
    setup.options.close()
    return PatternEngine(geometry(), setup.chunk_tokens, limit)


def make_backend(setup: BackendSetup) -> CountingBackend:
    """Return a backend that computes no prompts."""
    setup.options.close()
    return CountingBackend(geometry(), setup.max_lanes)


def make_nothing(setup: EngineSetup) -> None:
    """Return what is no engine."""
