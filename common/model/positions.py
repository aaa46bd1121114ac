"""How a model encodes positions, and how many of them it has.

Theory of operation: rotary encodings with fixed frequencies give a position the same numbers in every
company, so a prompt can be computed in pieces and next to others. Those that follow the longest sequence of
a batch do not, and are refused with all that are unknown. A checkpoint says by `max_position_embeddings` what
it was made for; where the frequencies are stretched (`linear`, `yarn`) an operator may go up to the factor:

    linear    max_position_embeddings x factor
    yarn      original_max_position_embeddings x factor

Not here: the text of config.json (`common/model/folder/configuration.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import UnsupportedModel

_COMMON = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
)

_KEYS = {
    "default": frozenset[str](),
    "proportional": frozenset({"factor"}),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
            "mscale", "mscale_all_dim", "truncate",
        }
    ),
}  # fmt: skip
"""Kinds whose frequencies are fixed, and the keys that each of them obeys."""

_BATCH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Kinds whose frequencies follow the longest position in the batch."""


def check_positions(name: str, decoder: PreTrainedConfig) -> None:
    """Raise UnsupportedModel for an encoding that is not exact over chunks and batches, or is no number."""
    for where, rope in _encodings(decoder):
        kind = str(rope.get("rope_type", "default"))
        if kind in _BATCH_DEPENDENT:
            problem = f"{where}.rope_type {kind} depends on the longest sequence of the batch"
            raise UnsupportedModel(name, (), problem)
        if kind not in _KEYS:
            known = ", ".join(sorted(_KEYS))
            raise UnsupportedModel(name, (), f"{where}.rope_type {kind!r} is unknown; there are {known}")
        for key in sorted((_KEYS[kind] - {"truncate"}) & rope.keys()):
            least = 1 if key == "factor" else 0
            if not _is_number(rope[key], least) and (rope[key] is not None or key == "factor"):
                raise UnsupportedModel(name, (), f"{where}.{key} is {rope[key]!r}, not a number from {least}")


def check_rotation(model: PreTrainedModel, decoder: PreTrainedConfig) -> None:
    """Raise UnsupportedModel when a model rotates another part of its heads than its config says."""
    lengths = {
        len(buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2].endswith("inv_freq")
    }
    for where, rope in _encodings(decoder):
        factor = rope.get("partial_rotary_factor") or 1
        if factor == 1 or rope.get("rope_type") == "proportional" or not lengths:
            continue
        # Not asked for before: a size that differs by layer raises when it is.
        head_dim = getattr(decoder, "head_dim", None)
        if head_dim and (int(head_dim * factor) + 1) // 2 not in lengths:
            problem = f"{where}.partial_rotary_factor is {factor}, which this model type does not obey"
            raise UnsupportedModel(str(decoder.model_type), (), problem)


def ignored_keys(decoder: PreTrainedConfig) -> tuple[str, ...]:
    """Return the keys about positions that the kind of their encoding does not know, with their path."""
    return tuple(
        f"{where}.{key}"
        for where, rope in _encodings(decoder)
        for key in sorted(rope)
        if key not in _COMMON | _KEYS.get(str(rope.get("rope_type", "default")), frozenset())
    )


def context_limits(decoder: PreTrainedConfig) -> tuple[int, int]:
    """Return how many positions the config says, and how many its encoding can be stretched to.

    Raises UnsupportedModel when the config says none.
    """
    declared = getattr(decoder, "max_position_embeddings", None)
    if not isinstance(declared, int):
        raise UnsupportedModel(str(decoder.model_type), (), "its config has no max_position_embeddings")
    stretched = [_stretched(declared, rope) for _, rope in _encodings(decoder)]
    return declared, max(declared, min(stretched, default=declared))


def _stretched(declared: int, rope: Mapping[str, Any]) -> int:
    kind, factor = rope.get("rope_type"), rope.get("factor") or 1
    if kind == "yarn":
        return int((rope.get("original_max_position_embeddings") or declared) * factor)
    return int(declared * factor) if kind == "linear" else declared


def _encodings(decoder: PreTrainedConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each set of parameters with its path: one for all layers, or one for each kind of them."""
    rope = getattr(decoder, "rope_parameters", None) or {}
    nested = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    if not nested and rope:
        yield "rope_parameters", rope
    for key, value in nested.items():
        yield f"rope_parameters.{key}", value


def _is_number(value: Any, least: int) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= least
