"""The KV geometry of a transformers model, from its config alone, or a refusal that names the layers.

Theory of operation: transformers' own rule for building caches gives each layer's type, so kvspan and
`generate` agree on which layer holds what. Only full and sliding-window attention hold KV that can be
handed over; a layer that reuses another layer's KV, or has no attention, owns none. Everything else is
refused before weights are read (`refusals.py`).

`check_against` is the second fence: it runs two tokens through the loaded model and compares what its cache
holds with the geometry.

Not here: what is refused (`refusals.py`), what a geometry means (`common/kv/geometry.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from common.errors import UnsupportedModel
from common.kv.geometry import DType, KVGeometry, LayerGeometry
from common.model.positions import check_positions, check_rotation
from common.model.refusals import OWNS_NONE, SLIDING, refuse_undeclared, refuse_unsupported


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of the config that describes the decoder of text."""
    decoder: PreTrainedConfig = config.get_text_config(decoder=True)
    if not isinstance(decoder, PreTrainedConfig):
        raise UnsupportedModel(str(config.model_type), (), "text_config is no key of this model type")
    return decoder


def use_plainly(config: PreTrainedConfig) -> None:
    """Undo what a config says of the form of outputs and of kernels: both are the caller's."""
    for part in (config, text_config(config)):
        part._attn_implementation, part._experts_implementation = None, None
        part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False


def describe(config: PreTrainedConfig, dtype: DType) -> KVGeometry:
    """Return the KV-owning layers of a model with this config.

    Raises UnsupportedModel, naming the layers where single layers are to blame.
    """
    name = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, (), "encoder-decoder models keep KV of another sequence too")
    decoder = text_config(config)
    if not hasattr(decoder, "num_hidden_layers"):
        raise UnsupportedModel(name, (), "its config describes no single stack of layers")
    refuse_undeclared(name, decoder)
    layer_types = _layer_types(decoder)
    refuse_unsupported(config, decoder, layer_types)
    check_positions(name, decoder)
    layers = tuple(
        _layer(index, layer_types[index], layer_config, dtype)
        for index, layer_config in enumerate(decoder.per_layer_config)
        if layer_types[index] != OWNS_NONE
    )
    if not layers:
        raise UnsupportedModel(name, (), "no layer owns KV")
    return KVGeometry(layers, int(decoder.vocab_size))


def check_against(model: PreTrainedModel, geometry: KVGeometry) -> None:
    """Run two tokens through a loaded model and compare its cache, logits and rotation with what was said.

    Raises UnsupportedModel, naming each layer that holds something else.
    """
    check_rotation(model, text_config(model.config))
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
    if not bool(output.logits.isfinite().all()):
        dtype = str(model.dtype).removeprefix("torch.")
        raise UnsupportedModel(model.config.model_type, (), f"its logits are no finite numbers in {dtype}")
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
    window = getattr(config, "sliding_window", None) if layer_type == SLIDING else None
    return LayerGeometry(index, int(num_kv_heads), int(head_dim), dtype, window)
