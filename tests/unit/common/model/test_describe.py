"""Tests of common/model/describe.py."""

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MllamaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    T5Config,
    Zamba2Config,
)

from common.errors import UnsupportedModel
from common.kv.geometry import DType, GroupGeometry, LayerGeometry
from common.model.describe import check_against, describe
from common.model.folder.source import TinyFamily
from common.model.tiny import make_tiny, tiny_config, tiny_gemma3_config

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}


def make_sharing_config() -> Gemma3nTextConfig:
    """Return six layers of which the last two read the KV of layers 2 and 3."""
    return Gemma3nTextConfig(
        **SIZES,
        num_hidden_layers=6,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=259,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
    )


def test_full_attention_gives_one_group() -> None:
    """Layers of one shape and no window form one group, with the config's KV heads and head size."""
    geometry = describe(tiny_config(TinyFamily.LLAMA), DType.BFLOAT16)

    assert geometry.groups == (GroupGeometry(0, (0, 1, 2, 3, 4), 3, 12, DType.BFLOAT16, None),)
    assert geometry.vocab_size == 259


def test_windowed_layers_form_their_own_group() -> None:
    """A sliding layer carries its window, a full layer none."""
    geometry = describe(tiny_gemma3_config(window=24), DType.FLOAT32)

    assert geometry.groups == (
        GroupGeometry(0, (0, 1, 2, 3, 4), 2, 16, DType.FLOAT32, 24),
        GroupGeometry(1, (5,), 2, 16, DType.FLOAT32, None),
    )


def test_window_counts_without_layer_types() -> None:
    """A config that has a window and lists no layer types slides in every layer."""
    geometry = describe(MistralConfig(num_hidden_layers=3, sliding_window=48), DType.FLOAT32)

    assert [layer.window for layer in geometry.layers] == [48, 48, 48]


def test_head_size_is_derived_when_the_config_has_none() -> None:
    """Without head_dim the heads share the hidden size."""
    config = LlamaConfig(hidden_size=60, num_attention_heads=5, num_key_value_heads=5, num_hidden_layers=1)

    assert describe(config, DType.FLOAT16).layers == (LayerGeometry(0, 5, 12, DType.FLOAT16, None),)


def test_text_part_of_a_multimodal_config_counts() -> None:
    """Of a model that also sees images only the text decoder is described."""
    text = Gemma3TextConfig(**SIZES, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    geometry = describe(Gemma3Config(text_config=text.to_dict()), DType.FLOAT32)

    assert [(layer.num_kv_heads, layer.head_dim) for layer in geometry.layers] == [(2, 16), (2, 16)]


def test_layers_of_different_head_sizes_form_groups() -> None:
    """Head sizes that differ from layer to layer are taken from each layer's own config."""
    config = Gemma4TextConfig(num_hidden_layers=6, global_head_dim=320, head_dim=192)

    assert [group.head_dim for group in describe(config, DType.FLOAT32).groups] == [192, 320]


def test_layers_that_share_kv_own_none() -> None:
    """S16, H18: A sharing layer is not listed."""
    config = make_sharing_config()

    assert [layer.layer_index for layer in describe(config, DType.FLOAT32).layers] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (
            Qwen3NextConfig(num_hidden_layers=4),
            ["0:linear_attention", "1:linear_attention", "2:linear_attention"],
        ),
        (MambaConfig(num_hidden_layers=2), ["0:linear_attention", "1:linear_attention"]),
        (Mamba2Config(num_hidden_layers=1), ["0:linear_attention"]),
        (FalconMambaConfig(num_hidden_layers=1), ["0:linear_attention"]),
        (RecurrentGemmaConfig(num_hidden_layers=3), ["0:linear_attention", "1:linear_attention"]),
        (JambaConfig(num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1), ["0:linear_attention"]),
        (
            Zamba2Config(num_hidden_layers=2, layers_block_type=["mamba", "hybrid"]),
            ["0:linear_attention", "1:hybrid"],
        ),
        (RwkvConfig(num_hidden_layers=2), ["0:recurrent", "1:recurrent"]),
        (Llama4TextConfig(num_hidden_layers=4), [f"{index}:chunked_attention" for index in (0, 1, 2)]),
        (DeepseekV3Config(num_hidden_layers=2), ["0:latent_attention", "1:latent_attention"]),
        (
            MllamaConfig(text_config={"num_hidden_layers": 5, "cross_attention_layers": [3]}),
            ["3:cross_attention"],
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_layers_without_plain_kv_are_refused_by_name(config: PreTrainedConfig, layers: list[str]) -> None:
    """R1: State other than keys and values per token is refused from the config alone, naming each layer."""
    with pytest.raises(UnsupportedModel) as refusal:
        describe(config, DType.FLOAT32)

    assert list(refusal.value.layers) == layers
    assert layers[0] in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (T5Config(), "encoder-decoder"),
        (Gemma2Config(), "attn_logit_softcapping=50"),
        (GptOssConfig(), "sinks"),
        (BloomConfig(), "BloomForCausalLM"),
        (BertConfig(), "is_decoder"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (LlamaConfig(quantization_config={"kv_cache_scheme": {"num_bits": 8}}), "kv_cache_scheme"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_foreign_attention_is_refused_with_its_reason(config: PreTrainedConfig, field: str) -> None:
    """N6, N10: Attention that needs more than keys, values and a window is refused, naming what it needs."""
    with pytest.raises(UnsupportedModel, match=field):
        describe(config, DType.FLOAT32)


@pytest.mark.parametrize(
    "config",
    [*map(tiny_config, TinyFamily), make_sharing_config()],
    ids=lambda config: config.model_type,
)
def test_loaded_model_holds_what_was_described(config: PreTrainedConfig) -> None:
    """The cache a model really fills has the layers, shapes and dtype of its geometry."""
    model = make_tiny(config, 0, torch.bfloat16)

    check_against(model, describe(config, DType.BFLOAT16))


def test_model_that_holds_something_else_is_refused_by_layer() -> None:
    """A geometry that does not fit the model is found before any request."""
    model = make_tiny(tiny_config(TinyFamily.QWEN3), 0, torch.float32)
    geometry = describe(tiny_config(TinyFamily.LLAMA), DType.FLOAT32)

    with pytest.raises(UnsupportedModel) as refusal:
        check_against(model, geometry)

    assert [layer.split(":")[0] for layer in refusal.value.layers] == ["0", "1", "2", "3"]
