"""KV of a made-up model: its shape from options, its bytes a pattern of layer, position and place in the row.

Theory of operation: what hands KV over can be measured at any size without computing it. Every row differs
from every other, so that a row in a wrong place shows; and a layer's rows cost one addition a word, so that
they are made at the speed of memory:

    word j of the keys (values) of position p in layer l  =  seed(l, kind) + p * A + j * B      modulo 2**64

Ownership: pure; both services make the same bytes.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.engine.identity import EngineIdentity
from common.engine.options import Options
from common.kv.geometry import DType, GroupGeometry, KVGeometry, LayerGeometry
from common.kv.ranges import Range
from common.session.identity import ModelFingerprint, Origin

PATTERN = "replay pattern 1"
"""What decides the bytes, beside the shape."""

_WORD = 8
_BY_POSITION, _BY_WORD, _BY_LAYER = (
    np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), 0x165667B19E3779F9,
)  # fmt: skip
"""Odd, so that no two positions of a row's word are alike."""


def read_shape(options: Options) -> EngineIdentity:
    """Return a made-up model; options: layers, kv_heads, head_dim, dtype, vocab, window.

    Raises: `ConfigError` for rows that are no whole words.
    """
    layers = options.integer("layers", 32, minimum=1, maximum=4096)
    heads = options.integer("kv_heads", 8, minimum=1, maximum=1 << 16)
    head_dim = options.integer("head_dim", 128, minimum=1, maximum=1 << 16)
    dtype = DType(options.choice("dtype", [kind.value for kind in DType], DType.BFLOAT16.value))
    vocab = options.integer("vocab", 259, minimum=2, maximum=1 << 24)
    window = options.integer("window", 0, maximum=1 << 30) or None
    if head_dim * dtype.itemsize % _WORD:
        raise options.refuse("head_dim", f"must have a multiple of {_WORD} bytes")
    shape = tuple(LayerGeometry(index, heads, head_dim, dtype, window) for index in range(layers))
    digest = xxhash.xxh3_128_hexdigest(f"{layers}|{heads}|{head_dim}|{dtype.value}|{vocab}|{window}".encode())
    return EngineIdentity(
        model_name="replay",
        fingerprint=ModelFingerprint(digest, digest, digest, digest),
        config_fields=(),
        tokenizer_fields=(),
        geometry=KVGeometry(shape, vocab),
        origin=Origin.DECLARED,
    )


class Pattern:
    """The rows of one group, for stretches of positions that are asked for again and again."""

    def __init__(self, group: GroupGeometry) -> None:
        self._group = group
        self._words = group.row_bytes // _WORD
        self._positions = Range(0, 0)
        self._base: NDArray[np.uint64] = np.zeros((0, self._words), np.uint64)
        # Invariant: what the rows of `_positions` are but for the seed of their layer.

    def rows(self, layer_index: int, kind: int, tokens: Range) -> NDArray[np.uint64]:
        """Return keys (0) or values (1) of a model layer [tokens, KV heads, words]; a fresh array."""
        # Wrapping around is what is meant.
        seed = np.uint64(_BY_LAYER * (2 * layer_index + kind + 1) % (1 << 64))
        rows = self._base_of(tokens) + seed
        return rows.reshape(len(tokens), self._group.num_kv_heads, -1)

    def _base_of(self, tokens: Range) -> NDArray[np.uint64]:
        if tokens != self._positions:
            positions = np.arange(tokens.start, tokens.stop, dtype=np.uint64) * _BY_POSITION
            words = np.arange(self._words, dtype=np.uint64) * _BY_WORD
            self._base = positions[:, None] + words
            self._positions = tokens
        return self._base


def next_token(token_ids: list[int], vocab_size: int) -> NDArray[np.float32]:
    """Return logits that leave no doubt: the number above the last token."""
    logits = np.zeros(vocab_size, np.float32)
    logits[(token_ids[-1] + 1) % vocab_size] = 20.0
    return logits
