"""The shape of a model's KV cache: which layers own KV, how they group, what one token costs.

Theory of operation: a `KVGeometry` lists the KV-owning layers of a model. Layers with the same shape,
dtype and retention form a group; a group index is its position in order of first appearance. Inside a
group a layer is addressed by its *group layer index*, the position in `GroupGeometry.layer_indices`;
spans and coverage use that index, never the model's. Layers that reuse another layer's KV own none and
are not listed.

Not here: how pages are held (`decode_service/cache`), how a transformers model is described
(`common/model/describe.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.kv.ranges import Range


class DType(enum.Enum):
    """Element type of keys and values."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One KV-owning layer."""

    layer_index: int
    """Position of the layer in the model."""

    num_kv_heads: int
    head_dim: int
    """Elements of one head; keys and values have the same size."""

    dtype: DType

    window: int | None
    """Tokens a query sees, itself included; None when it sees all."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Layers that share page shape and retention rule."""

    group_index: int
    layer_indices: tuple[int, ...]
    """Model layer of each group layer index, ascending."""

    num_kv_heads: int
    head_dim: int
    dtype: DType
    window: int | None

    @property
    def num_layers(self) -> int:
        """Layers that own KV in this group."""
        return len(self.layer_indices)

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys (or of the values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers of the group."""
        return 2 * self.row_bytes * self.num_layers

    def visible(self, context_len: int) -> Range:
        """Return the positions a query at position `context_len` may see before it.

        This is what must be transferred for a prompt of `context_len` tokens:

            |0 ..... start |start ........ context_len | next token
            | not visible  | window - 1 tokens         | itself
        """
        # The token at context_len brings its own KV and is one of the window's, hence window - 1.
        if self.window is None:
            return Range(0, context_len)
        return Range(max(0, context_len - (self.window - 1)), context_len)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """All KV-owning layers of one model."""

    layers: tuple[LayerGeometry, ...]
    vocab_size: int
    """Length of the logits that PrefillDone carries."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a geometry needs at least one KV-owning layer")
        indices = [layer.layer_index for layer in self.layers]
        if indices != sorted(set(indices)):
            raise ValueError(f"layer indices must ascend without repeats, got {indices}")

    @property
    def groups(self) -> tuple[GroupGeometry, ...]:
        """Return the groups in order of first appearance."""
        shapes: dict[tuple[int, int, DType, int | None], list[int]] = {}
        for layer in self.layers:
            # Window included: layers that forget at different times cannot share a table of pages.
            key = (layer.num_kv_heads, layer.head_dim, layer.dtype, layer.window)
            shapes.setdefault(key, []).append(layer.layer_index)
        return tuple(
            GroupGeometry(index, tuple(layers), *shape)
            for index, (shape, layers) in enumerate(shapes.items())
        )

    @property
    def by_layer(self) -> dict[int, tuple[GroupGeometry, int]]:
        """Return group and group layer index of each KV-owning layer, by model layer, ascending."""
        places = {
            layer_index: (group, group_layer)
            for group in self.groups
            for group_layer, layer_index in enumerate(group.layer_indices)
        }
        return dict(sorted(places.items()))

    @property
    def dtypes(self) -> dict[int, DType]:
        """Return the element type of each KV-owning layer, by model layer."""
        return {layer.layer_index: layer.dtype for layer in self.layers}

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over every KV-owning layer."""
        return sum(group.token_bytes for group in self.groups)

    def required(self, first_token: int, prompt_len: int) -> tuple[Range, ...]:
        """Return, per group, the positions a transfer must carry.

        `first_token` is the first position to export; what lies before it is already held.
        """
        export = Range(first_token, prompt_len)
        return tuple(group.visible(prompt_len).intersection(export) for group in self.groups)
