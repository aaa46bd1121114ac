"""Digests that say whether two services loaded the same model, by content and never by place.

Theory of operation: three digests (XXH3, 128 bits). *config* covers the canonical JSON of the model config
without what differs between copies of one model: names, paths, library version, stored dtype, the choice of
an attention kernel. *weights* covers name, dtype, shape and bytes of every tensor of the loaded state in
name order, so neither folder nor sharding matters; a tensor under several names (tied) counts once, under
the first. *tokenizer* covers its serialised form, chat template and special ids.

Not here: comparing them (`common/session`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from common.session.identity import ModelFingerprint

_INCIDENTAL = frozenset(
    {"_name_or_path", "architectures", "attn_implementation", "dtype", "torch_dtype", "transformers_version"}
)
"""Config keys that may differ between two copies of one model."""

_CALL_STATE = frozenset({"padding", "truncation"})
"""Tokenizer keys that an earlier call may have set."""


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> ModelFingerprint:
    """Return the digests of a loaded model; reads every weight once."""
    return ModelFingerprint(
        config=config_digest(model.config),
        weights=weights_digest(model),
        tokenizer=tokenizer_digest(tokenizer),
    )


def config_digest(config: PreTrainedConfig) -> str:
    """Return the digest of everything in the config that changes what the model computes."""
    return _json_digest(config_fields(config))


def config_fields(config: PreTrainedConfig) -> tuple[tuple[str, str], ...]:
    """Return each key of the config that counts, with its canonical JSON, sorted by key."""
    fields = _without(config.to_dict(), _INCIDENTAL)
    return tuple((key, _canonical(fields[key])) for key in sorted(fields))


def weights_digest(model: torch.nn.Module) -> str:
    """Return the digest of the loaded state, in the dtype it was loaded in."""
    digest = xxhash.xxh3_128()
    for name, tensor in _distinct_tensors(model):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the digest of how text becomes token ids and back."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return _json_digest(
        {
            "backend": {key: value for key, value in backend.items() if key not in _CALL_STATE},
            "chat_template": tokenizer.chat_template,
            "special_ids": {
                "bos": tokenizer.bos_token_id,
                "eos": tokenizer.eos_token_id,
                "pad": tokenizer.pad_token_id,
                "all": sorted(tokenizer.all_special_ids),
            },
        }
    )


def _distinct_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the state in name order, one that shares its memory only the first time."""
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in sorted(model.state_dict().items()):
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        yield name, tensor


def _json_digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(value).encode())


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def _without(value: Any, keys: frozenset[str]) -> Any:
    """Return a JSON value without these keys, at any depth."""
    if isinstance(value, dict):
        return {str(key): _without(item, keys) for key, item in value.items() if key not in keys}
    if isinstance(value, (list, tuple)):
        return [_without(item, keys) for item in value]
    return value
