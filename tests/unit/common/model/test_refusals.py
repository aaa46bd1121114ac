"""What a config says about its architecture is served as it is, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from common.errors import UnsupportedModel
from common.kv.geometry import DType
from common.model.describe import describe

OLDER_KEYS: dict[str, Any] = {
    "is_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False, "torchscript": False,
    "use_bfloat16": False, "pruned_heads": {}, "output_attentions": False, "output_scores": False,
    "return_dict_in_generate": False, "cross_attention_hidden_size": None, "decoder_start_token_id": None,
    "is_encoder_decoder": False, "max_length": 20, "num_beams": 1, "tf_legacy_loss": False, "top_k": 50,
    "task_specific_params": None, "prefix": None, "tokenizer_class": None, "sep_token_id": None,
    "bad_words_ids": None, "finetuning_task": None, "remove_invalid_values": False, "suppress_tokens": None,
    "begin_suppress_tokens": None, "exponential_decay_length_penalty": None, "chunk_size_feed_forward": 0,
    "torch_dtype": "bfloat16", "transformers_version": "4.44.0", "rope_scaling": None, "_name_or_path": "x",
}  # fmt: skip
"""What transformers 4 wrote of a plain Llama in full."""


def test_plain_decoder_of_an_older_release_is_served() -> None:
    """Row Y5: `is_decoder: false` stood in every config; it counts for the types that declare it."""
    config = LlamaConfig(**OLDER_KEYS, architectures=["LlamaForCausalLM"], num_hidden_layers=2)

    assert describe(config, DType.FLOAT32) == describe(LlamaConfig(num_hidden_layers=2), DType.FLOAT32)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "OwnLlamaForCausalLM", "YiForCausalLM"])
def test_class_that_generates_is_served(name: str) -> None:
    """A base class has a head when it is tied; a name of somebody's own code means transformers' class."""
    describe(LlamaConfig(num_hidden_layers=1, architectures=[name]), DType.FLOAT32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            LlamaConfig(architectures=["LlamaForSequenceClassification"]),
            "LlamaForSequenceClassification, this",
        ),
        (LlamaConfig(architectures=["MistralForCausalLM"]), "MistralForCausalLM, this model type runs Llama"),
        (LlamaConfig(is_causal=False), "not causal"),
        (LlamaConfig(hidden_act="magic"), "hidden_act is 'magic', which transformers does not know"),
        (LlamaConfig(is_encoder_decoder=True), "encoder-decoder"),
        (BertConfig(is_decoder=False), "not causal"),
        (LlamaConfig(sliding_window=64), "sliding_window=64 is no key of this model type"),
        (
            LlamaConfig(num_hidden_layers=1, layer_types=["sliding_attention"]),
            "layer_types=.* is no key of this",
        ),
        (MistralConfig(num_hidden_layers=2, sliding_window=0), "0:sliding_window=0, 1:sliding_window=0"),
        (MistralConfig(num_hidden_layers=1, sliding_window=-5), "0:sliding_window=-5"),
        (
            Qwen2Config(num_hidden_layers=2, sliding_window=None, layer_types=["sliding_attention"] * 2),
            "0:sliding_window=None, 1:sliding_window=None",
        ),
    ],
)
def test_config_that_would_compute_something_else_is_refused(config: PreTrainedConfig, said: str) -> None:
    """Another head, no direction, and windows that the cache would obey and the attention would not."""
    with pytest.raises(UnsupportedModel, match=said):
        describe(config, DType.FLOAT32)
