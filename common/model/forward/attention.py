"""One attention function for chunked prefill and for paged decode, in transformers' own models.

Theory of operation: transformers passes what `cache.update` returned straight on to the attention function.
Our caches return no tensors there but an `AttendedKV`, which knows where its keys and values lie and which
of them each query may see; this function checks that the model asks for nothing else and lets it attend.
No mask function is registered under our name, so transformers builds no mask. Keys and values are
token-major everywhere: kernels then see the same strides whether the tokens come from one run of pages, from
a copy of several, or straight from the model.

A windowed layer's window comes from the geometry; a model that asks for another one is an error.

Shapes: B sequences, T query tokens, L attended tokens, Q query heads, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from common.errors import EngineFailed

NAME = "kvspan"
"""What the attention function is registered as."""

_IGNORED = frozenset({"position_ids", "use_cache", "cache_position", "shared_kv_states", "logits_to_keep"})
"""Arguments that change nothing about attention over keys and values that lie ready."""


class AttendedKV(Protocol):
    """Keys and values of one layer and the queries that may see them."""

    @property
    def window(self) -> int | None:
        """Tokens a query sees, itself included; None when it sees all before it."""

    def attend(self, query_BQTD: Tensor, scaling: float | None) -> Tensor:
        """Return the attention output [B, T, Q, D]."""


def install(model: PreTrainedModel) -> None:
    """Let `model` attend through `AttendedKV`; it then runs with our caches only. Idempotent."""
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


def attend(  # noqa: PLR0913 - transformers' signature
    module: nn.Module,
    query: Tensor,
    key: AttendedKV,
    value: AttendedKV,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend the way transformers' attention functions do; `key` and `value` are the same `AttendedKV`.

    Raises EngineFailed for anything that would change the result and is not known here.
    """
    if isinstance(key, Tensor) or key is not value:
        raise EngineFailed("the model does not attend to what its cache returned")
    if attention_mask is not None:
        raise EngineFailed("the model brings an attention mask of its own")
    if dropout:
        raise EngineFailed("the model is in training mode")
    if sliding_window is not None and sliding_window != key.window:
        raise EngineFailed(f"the model asks for window {sliding_window}, its geometry says {key.window}")
    if others:
        _refuse_unknown(module, others)
    return key.attend(query, scaling), None


def attend_chunk(
    query_BQTD: Tensor, key_LHD: Tensor, value_LHD: Tensor, mask_TL: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend from the last T of L positions; without a mask T equals L and attention is causal.

    Returns [1, T, Q, D].
    """
    output_BQTD = functional.scaled_dot_product_attention(
        query_BQTD,
        key_LHD.transpose(0, 1)[None],
        value_LHD.transpose(0, 1)[None],
        attn_mask=mask_TL,
        is_causal=mask_TL is None,
        scale=scaling,
        enable_gqa=query_BQTD.shape[1] != key_LHD.shape[1],
    )
    return output_BQTD.transpose(1, 2)


def attend_each(
    query_BQ1D: Tensor, keys_1HLD: Sequence[Tensor], values_1HLD: Sequence[Tensor], scaling: float | None
) -> Tensor:
    """Attend from one token of every sequence to all of its own keys; returns [B, 1, Q, D].

    Each sequence is a call of its own, so that its bits depend on nobody else. The query heads that share a
    KV head stand in the place of query tokens: keys are read once and nothing is repeated.
    """
    num_sequences, num_heads, _, head_dim = query_BQ1D.shape
    num_kv_heads = keys_1HLD[0].shape[1]
    grouped = query_BQ1D.reshape(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
    outputs = [
        functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        for query, key, value in zip(grouped.split(1), keys_1HLD, values_1HLD, strict=True)
    ]
    output = outputs[0] if num_sequences == 1 else torch.cat(outputs)
    return output.reshape(num_sequences, 1, num_heads, head_dim)


def chunk_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which of the last `num_keys` positions each of the last `num_queries` sees.

    None stands for plain causal attention, which has a kernel of its own.
    """
    if num_queries == num_keys and (window is None or window >= num_keys):
        return None
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :, None]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    unknown = sorted(
        name
        for name, value in others.items()
        if value is not None and value is not False and name not in _IGNORED and name != "is_causal"
    )
    if others.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise EngineFailed(
            f"{type(module).__name__} asks for {', '.join(unknown)}, unknown to this attention"
        )
