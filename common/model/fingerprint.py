"""Digests that say whether two services loaded the same model, by content and never by place.

Theory of operation: four digests (XXH3, 128 bits). *config* covers the canonical JSON of the keys that the
model type declares, with their defaults, and of those that transformers reads of any; without what changes no
number of a forward: names, token ids, training, outputs, caches. What else stands in a config (notes of its
author, keys that an older release wrote for every model) is read by nobody. *weights* covers name, dtype,
shape and bytes of every tensor of the loaded state in name order, so neither folder nor sharding matters; a
tensor under several names (tied) counts once, under the first; *rounded weights* are the same in bfloat16, so
that one checkpoint is known again in another element type. *tokenizer* covers its serialised form, chat
template and special ids.

Not here: comparing them (`common/session`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from common.session.identity import ModelFingerprint

Fields = tuple[tuple[str, str], ...]
"""Names with the canonical JSON of their values, sorted."""

_INCIDENTAL = frozenset(
    {
        *(field.name for field in dataclasses.fields(PreTrainedConfig)),
        "_name_or_path", "attn_implementation", "torch_dtype", "use_cache", "pretraining_tp", "type",
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "initializer_range", "initializer_factor", "init_std", "output_router_logits", "router_aux_loss_coef",
        "router_jitter_noise", "num_logits_to_keep", "max_window_layers", "use_sliding_window",
        "max_position_embeddings", "tie_word_embeddings",
    }
)  # fmt: skip
"""Declared keys that change no number: what every config has, token ids, training and outputs, the longest
prompt, which each service bounds for itself, and what only makes something else that counts: `type` of a
position encoding its `rope_type`, windows the `layer_types`, tied embeddings the weights."""

_DROPOUT = ("dropout", "pdrop", "layerdrop")
"""In names of keys that count no more than these: only training obeys them."""

READ_OF_ANY = frozenset(
    {
        "model_type", "head_dim", "kv_sharing_modes", "layer_types",
        "per_layer_config", "sliding_window",
    }
)  # fmt: skip
"""Keys that transformers reads of a model type whether it declares them or not."""

_CALL_STATE = frozenset({"padding", "truncation"})
"""Tokenizer keys that an earlier call may have set."""


_SHOWN_CHARS = 64 << 10
"""Of one field: any chat template, and of a vocabulary its digest."""


def fingerprint(model: PreTrainedModel, config: Fields, tokenizer: Fields) -> ModelFingerprint:
    """Return the digests of a loaded model and of its fields; reads every weight twice."""
    return ModelFingerprint(
        config=_json_digest(config),
        weights=weights_digest(model),
        tokenizer=_json_digest(tokenizer),
        rounded_weights=rounded_digest(model),
    )


def config_fields(config: PreTrainedConfig) -> Fields:
    """Return each key of the config that counts, with its canonical JSON, sorted by key."""
    return _canonical_fields(_counted(config, config.to_dict()))


def _counted(config: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return of the fields of a config those that count, of a config inside it too."""
    known = {field.name for field in dataclasses.fields(config)} | READ_OF_ANY
    counted = {}
    for key, value in fields.items():
        # Nothing else is asked for: what differs by layer raises when it is.
        inner = getattr(config, key, None) if isinstance(value, dict) else None
        if key in _INCIDENTAL or key not in known or any(word in key for word in _DROPOUT):
            continue
        if isinstance(inner, PreTrainedConfig):
            counted[key] = _counted(inner, value)
        elif value or key not in READ_OF_ANY:
            counted[key] = _without(value, _INCIDENTAL)
    return counted


def weights_digest(model: torch.nn.Module) -> str:
    """Return the digest of the loaded state, in the dtype it was loaded in."""
    digest = xxhash.xxh3_128()
    for name, tensor in _distinct_tensors(model):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def rounded_digest(model: torch.nn.Module) -> str:
    """Return the digest of the loaded state in values of bfloat16, whatever dtype it was loaded in.

    float32 and bfloat16 copies of one checkpoint have one; float16 rounds twice, so that a model that was
    loaded in it has one of its own.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in _distinct_tensors(model):
        digest.update(f"{name}|{tuple(tensor.shape)}|".encode())
        rounded = tensor.detach().cpu().to(torch.bfloat16).contiguous()
        digest.update(rounded.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_fields(tokenizer: PreTrainedTokenizerFast) -> Fields:
    """Return each part of a tokenizer, its chat template too, with its canonical JSON, sorted by name."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    special_ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        "all": sorted(tokenizer.all_special_ids),
    }
    parts = {key: value for key, value in backend.items() if key not in _CALL_STATE}
    return _canonical_fields({**parts, "chat_template": tokenizer.chat_template, "special_ids": special_ids})


def _distinct_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the state in name order, one that shares its memory only the first time."""
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in sorted(model.state_dict().items()):
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        yield name, tensor


def _canonical_fields(values: dict[str, Any]) -> Fields:
    return tuple((key, _shown(_canonical(values[key]))) for key in sorted(values))


def _shown(text: str) -> str:
    """Return a text, or what tells a long one from others: a peer reads so much and no more."""
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{len(text)} characters, xxh3-128 {xxhash.xxh3_128_hexdigest(text.encode())}"


def _json_digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(value).encode())


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def _without(value: Any, keys: frozenset[str]) -> Any:
    """Return a JSON value without these keys at any depth, and whole numbers alike whatever their type."""
    if isinstance(value, dict):
        return {str(key): _without(item, keys) for key, item in value.items() if key not in keys}
    if isinstance(value, (list, tuple)):
        return [_without(item, keys) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
