"""Why a config describes a model whose KV cannot be handed over, or that would not compute what it says.

Theory of operation: only full and sliding-window attention over keys and values of one size is served, from
left to right, by transformers' own class for the next token. Everything else is refused from the config
alone, before weights are read, naming the layers where single layers are to blame.

Not here: the geometry of what is served (`describe.py`), positions (`positions.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.errors import UnsupportedModel
from common.excerpt import excerpt

FULL = "full_attention"
SLIDING = "sliding_attention"
OWNS_NONE = "dummy"
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

_CAUSAL_ANYWAY = frozenset({"gpt_neox", "gpt_neox_japanese"})
"""Model types that are causal whatever their is_decoder says."""

_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
"""How classes are called that have a head for the next token, or none of their own."""


def refuse_unsupported(
    config: PreTrainedConfig, decoder: PreTrainedConfig, layer_types: Sequence[str]
) -> None:
    """Raise UnsupportedModel for a model that is not served; `decoder` is the part of `config` about text."""
    name = str(config.model_type)
    _refuse_foreign_state(name, config, decoder, layer_types)
    _refuse_foreign_attention(name, decoder)
    _refuse_other_head(name, config)
    _refuse_unknown_activation(name, decoder)
    _refuse_quantized_cache(name, config)
    _refuse_bad_windows(name, decoder, layer_types)


def refuse_undeclared(name: str, decoder: PreTrainedConfig) -> None:
    """Refuse windows that a model type knows nothing of: caches would obey them, its attention would not."""
    window, types = getattr(decoder, "sliding_window", None), getattr(decoder, "layer_types", None)
    if window is not None and not _knows(decoder, "sliding_window"):
        raise UnsupportedModel(name, (), f"sliding_window={window} is no key of this model type")
    kind = FULL if window is None else SLIDING
    if any(one != kind for one in types or ()) and not _knows(decoder, "layer_types"):
        problem = f"layer_types={excerpt(str(types))} is no key of this model type, whose layers are {kind}"
        raise UnsupportedModel(name, (), problem)


def _refuse_foreign_state(
    name: str, config: PreTrainedConfig, decoder: PreTrainedConfig, layer_types: Sequence[str]
) -> None:
    """Refuse layers that keep anything but keys and values per token."""
    foreign = [
        f"{index}:{layer_type}"
        for index, layer_type in enumerate(layer_types)
        if layer_type not in (FULL, SLIDING, OWNS_NONE)
    ]
    if foreign:
        raise UnsupportedModel(name, foreign, "state of these layers is not keys and values per token")
    crossing = [f"{index}:cross_attention" for index in getattr(config, "cross_attention_layers", None) or ()]
    crossing += [
        f"{index}:cross_attention" for index in getattr(decoder, "cross_attention_layers", None) or ()
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
    """Tell whether a token sees only what lies before it; encoders say so by is_decoder=false.

    Older releases wrote that key for every model; it counts for those that declare it.
    """
    if getattr(decoder, "use_bidirectional_attention", None) in (True, "all"):
        return False
    if decoder.model_type in _CAUSAL_ANYWAY:
        return True
    is_decoder = not _declares(decoder, "is_decoder") or getattr(decoder, "is_decoder", True)
    return bool(is_decoder and getattr(decoder, "is_causal", True))


def _declares(config: PreTrainedConfig, key: str) -> bool:
    return key in {field.name for field in dataclasses.fields(config)}


def _knows(config: PreTrainedConfig, key: str) -> bool:
    """Tell whether a model type declares a key, or makes it of others."""
    return _declares(config, key) or hasattr(type(config)(), key)


def _refuse_bad_windows(name: str, decoder: PreTrainedConfig, layer_types: Sequence[str]) -> None:
    windows = [getattr(layer, "sliding_window", None) for layer in decoder.per_layer_config]
    wrong = [
        f"{index}:sliding_window={window}"
        for index, (kind, window) in enumerate(zip(layer_types, windows, strict=True))
        if kind == SLIDING and not (type(window) is int and window > 0)
    ]
    if wrong:
        raise UnsupportedModel(name, wrong, "a window holds one token at least")


def _refuse_other_head(name: str, config: PreTrainedConfig) -> None:
    """Refuse weights that were made for another task or another class than the one that would run them."""
    told = getattr(config, "architectures", None) or []
    served = _model_class(name, config).__name__
    others = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - {served}
    wrong = [str(one) for one in told if str(one) in others or not str(one).endswith(_GENERATING)]
    if wrong and len(wrong) == len(told):
        problem = f"architectures says {excerpt(', '.join(wrong))}, this model type runs {served}"
        raise UnsupportedModel(name, (), problem)


def _refuse_unknown_activation(name: str, decoder: PreTrainedConfig) -> None:
    for key in ("hidden_act", "hidden_activation"):
        value = getattr(decoder, key, None)
        if isinstance(value, str) and value not in ACT2FN:
            raise UnsupportedModel(name, (), f"{key} is {excerpt(value)!r}, which transformers does not know")


def _refuse_quantized_cache(name: str, config: PreTrainedConfig) -> None:
    """Refuse a checkpoint that wants its KV kept in fewer bits with scales beside it."""
    scheme = getattr(config, "quantization_config", None) or {}
    settings = scheme if isinstance(scheme, dict) else scheme.to_dict()
    for field in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if settings.get(field):
            raise UnsupportedModel(name, (), f"quantized KV ({field}={settings[field]}) is not supported")
    if getattr(config, "cache_implementation", None) == "quantized":
        raise UnsupportedModel(name, (), "quantized KV (cache_implementation=quantized) is not supported")
