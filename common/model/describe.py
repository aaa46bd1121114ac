"""The KV geometry of a transformers model, from its config alone, or a refusal that names the layers.

Theory of operation: transformers' own rule for building caches gives each layer's type, so kvspan and
`generate` agree on which layer holds what. Only full and sliding-window attention hold KV that can be
handed over; a layer that reuses another layer's KV, or has no attention, owns none. Everything else is
refused here, before weights are read: state that is not keys and values per token, keys and values of
different size, and attention that needs more than keys, values and a window.

`check_against` is the second fence: it runs two tokens through the loaded model and compares what its cache
holds with the geometry.

Not here: what a geometry means (`common/kv/geometry.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from common.errors import UnsupportedModel
from common.kv.geometry import DType, KVGeometry, LayerGeometry

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_OWNS_NONE = "dummy"
"""What transformers calls a layer without a cache of its own."""

_SINK_MODELS = frozenset(
    {
        "deepseek_v4",
        "flint",
        "gpt_oss",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "hy_v4_vl",
        "mimo_v2_flash",
        "openai_privacy_filter",
    }
)
"""Model types whose attention adds learned sinks to the softmax; no config field tells."""

_CAUSAL_ANYWAY = frozenset({"gpt_neox"})
"""Model types that are causal whatever their is_decoder says."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of the config that describes the decoder of text."""
    decoder: PreTrainedConfig = config.get_text_config(decoder=True)
    return decoder


def describe(config: PreTrainedConfig, dtype: DType, page_tokens: int) -> KVGeometry:
    """Return the KV-owning layers of a model with this config.

    Raises UnsupportedModel, naming the layers where single layers are to blame.
    """
    name = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, (), "encoder-decoder models keep KV of another sequence too")
    decoder = text_config(config)
    if not hasattr(decoder, "num_hidden_layers"):
        raise UnsupportedModel(name, (), "its config describes no single stack of layers")
    layer_types = _layer_types(decoder)
    _refuse_foreign_state(name, config, layer_types)
    _refuse_foreign_attention(name, decoder)
    _refuse_quantized_cache(name, config)
    layers = tuple(
        _layer(index, layer_types[index], layer_config, dtype)
        for index, layer_config in enumerate(decoder.per_layer_config)
        if layer_types[index] != _OWNS_NONE
    )
    if not layers:
        raise UnsupportedModel(name, (), "no layer owns KV")
    return KVGeometry(layers, page_tokens, int(decoder.vocab_size))


def check_against(model: PreTrainedModel, geometry: KVGeometry) -> None:
    """Run two tokens through a loaded model and compare its cache and logits with the geometry.

    Raises UnsupportedModel, naming each layer that holds something else.
    """
    tokens = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        output = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    expected = {
        layer.layer_index: (1, layer.num_kv_heads, 2, layer.head_dim, layer.dtype.value)
        for layer in geometry.layers
    }
    held = {index: _held(layer) for index, layer in enumerate(output.cache.layers)}
    wrong = [
        f"{index}:holds {shapes}, described {expected.get(index)}"
        for index, shapes in held.items()
        if shapes != ([expected[index]] * 2 if index in expected else [])
    ]
    if wrong:
        raise UnsupportedModel(
            model.config.model_type, wrong, "the model's cache is not what its config says"
        )
    if output.logits.shape[-1] != geometry.vocab_size:
        problem = f"logits have {output.logits.shape[-1]} values, the config says {geometry.vocab_size}"
        raise UnsupportedModel(model.config.model_type, (), problem)


def _held(layer: Any) -> list[tuple[Any, ...]]:
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [(*t.shape, str(t.dtype).removeprefix("torch.")) for t in tensors if t is not None]


def _layer_types(decoder: PreTrainedConfig) -> list[str]:
    layer_types, _ = get_layer_types_and_kwargs(decoder)
    return list(layer_types)


def _layer(index: int, layer_type: str, config: PreTrainedConfig, dtype: DType) -> LayerGeometry:
    num_heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    window = getattr(config, "sliding_window", None) if layer_type == _SLIDING else None
    return LayerGeometry(index, int(num_kv_heads), int(head_dim), dtype, window)


def _refuse_foreign_state(name: str, config: PreTrainedConfig, layer_types: Sequence[str]) -> None:
    """Refuse layers that keep anything but keys and values per token."""
    foreign = [
        f"{index}:{layer_type}"
        for index, layer_type in enumerate(layer_types)
        if layer_type not in (_FULL, _SLIDING, _OWNS_NONE)
    ]
    if foreign:
        raise UnsupportedModel(name, foreign, "state of these layers is not keys and values per token")
    crossing = [f"{index}:cross_attention" for index in getattr(config, "cross_attention_layers", None) or ()]
    crossing += [
        f"{index}:cross_attention"
        for index in getattr(text_config(config), "cross_attention_layers", None) or ()
    ]
    if crossing:
        raise UnsupportedModel(name, crossing, "these layers attend to another sequence")
    model_class = _model_class(name, config)
    if getattr(model_class, "_is_stateful", False):
        every = [f"{index}:recurrent" for index in range(len(layer_types))]
        raise UnsupportedModel(name, every, "the model carries a recurrent state")
    if not model_class._supports_attention_backend:
        raise UnsupportedModel(name, (), f"{model_class.__name__} does not let its attention be replaced")


def _model_class(name: str, config: PreTrainedConfig) -> Any:
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise UnsupportedModel(name, (), "transformers has no causal language model for this config")
    return mapping[type(config)]


def _refuse_foreign_attention(name: str, decoder: PreTrainedConfig) -> None:
    """Refuse attention that needs more than keys, values and a window."""
    latent = [
        f"{index}:latent_attention"
        for index, layer in enumerate(decoder.per_layer_config)
        if getattr(layer, "kv_lora_rank", None)
    ]
    if latent:
        raise UnsupportedModel(name, latent, "latent attention (kv_lora_rank) has other keys than values")
    uneven = [
        f"{index}:v_head_dim={layer.v_head_dim}"
        for index, layer in enumerate(decoder.per_layer_config)
        if getattr(layer, "v_head_dim", None) not in (None, getattr(layer, "head_dim", None))
    ]
    if uneven:
        raise UnsupportedModel(name, uneven, "keys and values have different sizes")
    if not _is_causal(decoder):
        fields = "use_bidirectional_attention, is_decoder, is_causal"
        raise UnsupportedModel(name, (), f"attention is not causal ({fields})")
    problem = _foreign_score(decoder)
    if problem:
        raise UnsupportedModel(name, (), problem)


def _foreign_score(decoder: PreTrainedConfig) -> str | None:
    if getattr(decoder, "attn_logit_softcapping", None) is not None:
        return f"attn_logit_softcapping={decoder.attn_logit_softcapping} is not supported"
    if decoder.model_type in _SINK_MODELS:
        return "attention sinks (sinks) are not supported"
    if decoder.model_type == "doge":
        return "a mask computed from the values (keep_window_size) is not supported"
    if getattr(decoder, "alibi", False):
        return "position bias (alibi) is not supported"
    kind = getattr(decoder, "position_embedding_type", None)
    if kind is not None and str(kind).startswith("relative"):
        return f"position bias (position_embedding_type={kind}) is not supported"
    return None


def _is_causal(decoder: PreTrainedConfig) -> bool:
    """Tell whether a token sees only what lies before it; encoders say so by is_decoder=false."""
    if getattr(decoder, "use_bidirectional_attention", None) in (True, "all"):
        return False
    if decoder.model_type in _CAUSAL_ANYWAY:
        return True
    return bool(getattr(decoder, "is_decoder", True) and getattr(decoder, "is_causal", True))


def _refuse_quantized_cache(name: str, config: PreTrainedConfig) -> None:
    """Refuse a checkpoint that wants its KV kept in fewer bits with scales beside it."""
    scheme = getattr(config, "quantization_config", None) or {}
    settings = scheme if isinstance(scheme, dict) else scheme.to_dict()
    for field in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if settings.get(field):
            raise UnsupportedModel(name, (), f"quantized KV ({field}={settings[field]}) is not supported")
    if getattr(config, "cache_implementation", None) == "quantized":
        raise UnsupportedModel(name, (), "quantized KV (cache_implementation=quantized) is not supported")
