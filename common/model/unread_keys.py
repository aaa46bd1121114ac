"""Keys of a config.json that no code of the model type reads: a typing error, or a note of the author.

Theory of operation: transformers keeps what a type does not declare and does not take for an older spelling
as an attribute that nobody looks at. A misspelt `rope_scaling` then changes nothing, without a word. Such
keys are told, but for those that ask for nothing (null, false, empty) or that releases wrote of every model.

Not here: keys about positions (`positions.py`), windows of a type without any (`refusals.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from common.model.fingerprint import READ_OF_ANY

_OF_EVERY_MODEL = frozenset(
    {
        "auto_map", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript", "use_bfloat16",
        "tf_legacy_loss", "pruned_heads", "cross_attention_hidden_size", "finetuning_task", "tokenizer_class",
        "prefix", "task_specific_params", "num_labels", "bos_token_id", "eos_token_id", "pad_token_id",
        "sep_token_id", "decoder_start_token_id", "use_cache", "rope_theta", "quantization_config",
        "transformers_weights", "tie_word_embeddings", "is_causal", "use_bidirectional_attention",
    }
)  # fmt: skip

_SAMPLING: Mapping[str, Any] = GenerationConfig._get_default_generation_params()


def unread_keys(config: PreTrainedConfig, written: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield the path of each key of `written`, from which `config` was made, that nobody reads."""
    known = {field.name for field in dataclasses.fields(config)} | READ_OF_ANY | _OF_EVERY_MODEL
    known |= {*config.attribute_map, *config.attribute_map.values()}
    for key, value in written.items():
        inner = vars(config).get(key)
        if isinstance(inner, PreTrainedConfig) and isinstance(value, Mapping):
            yield from unread_keys(inner, value, f"{where}{key}.")
        elif value and key not in known and not key.startswith("_"):
            # Defaults of sampling stood here once; the library drops them.
            is_default = key in _SAMPLING and value == _SAMPLING[key]
            if (key in vars(config) or key in _SAMPLING) and not is_default:
                yield where + key
