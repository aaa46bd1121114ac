"""Convert a Hugging Face model into parts of its layers, and see that they compute what it computes.

Theory of operation: each part is a torch module over the model's own layers, traced once with a length that
is left open; a width is set when it is compiled. The first part begins with token ids, the others with the
hidden rows of the one before. Every part returns keys and values of its layers as they are cached, token
first, and then its hidden rows, the last one instead the logits of one position:

    ids [1, T] or hidden [1, T, E]  ->  keys, values [T, H, D] of each layer, hidden [1, T, E] or logits [V]

Positions count from 0, so nothing is told about them. Before a converted model is kept it is run on a short
prompt, and compared with transformers.

Not here: where it is kept (`artefact.py`).

Shapes: T tokens, E hidden size, H KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.engine.identity import EngineIdentity
from common.engine.manifest import write_manifest
from common.errors import ConfigError, UnsupportedModel
from common.kv.geometry import DType, KVGeometry
from common.kv.ranges import Range
from common.model.loader import LoadedModel, load_model
from common.session.identity import Origin
from kvspan_openvino import runtime
from kvspan_openvino.artefact import MANIFEST_FILE, Facts, Recipe, part_file, seal
from kvspan_openvino.bar import shown
from kvspan_openvino.choices import share_out
from kvspan_openvino.engine import compile_pass, rows_of

FAMILIES = ("llama", "qwen3", "gemma3_text")
"""Model types whose layers are known to be called as they are here."""

_EXAMPLE_TOKENS = 8
_TRIAL_TOKENS = 24
_ROTATES_BY_KIND = "gemma3_text"
"""The one of them whose kinds of layers have each a rotation of its own."""

_UNIT = 2.0**-24
"""Relative error of rounding to float32."""

_GROWTH = 16
"""How much layers may amplify an error of an earlier one. Without it a tiny model of random weights reached
1.02 of the bound, the demo model 0.1; a wrong mask or rotation is of the size of the values themselves."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be converted, and how."""

    spec: str
    parts: int
    recipe: Recipe
    show_progress: bool


def convert(order: Order, folder: Path) -> None:
    """Convert a model into an empty folder and seal it.

    Raises: `ConfigError` and `UnsupportedModel` as `load_model` does; for a family that is not known, for
    more parts than layers, and when the result computes something else.
    """
    loaded = load_model(order.spec, "float32", order.show_progress)
    decoder = _decoder(loaded)
    num_layers = len(decoder.layers)
    if order.parts > num_layers:
        problem = f"the model has {num_layers} layers, and a part has one at least"
        raise ConfigError(runtime.FIELD, f"parts={order.parts}", problem)
    loaded.model.set_attn_implementation("sdpa")
    layers = share_out(num_layers, order.parts)
    for part, share in enumerate(shown("converting for OpenVINO", layers, order.show_progress)):
        _convert_part(loaded, share, folder / part_file(part))
    facts = Facts(int(decoder.config.hidden_size), num_layers, loaded.max_context, loaded.max_stretched)
    check(loaded, folder, layers, facts)
    write_manifest(folder / MANIFEST_FILE, identity_of(loaded), f"OpenVINO {runtime.version()}")
    seal(folder, order.recipe, facts)


def identity_of(loaded: LoadedModel) -> EngineIdentity:
    """Return the checkpoint that was loaded, with KV as a converted model delivers it: in float32."""
    layers = tuple(replace(layer, dtype=DType.FLOAT32) for layer in loaded.geometry.layers)
    return EngineIdentity(
        model_name=loaded.name,
        fingerprint=loaded.fingerprint,
        config_fields=loaded.config_fields,
        tokenizer_fields=loaded.tokenizer_fields,
        geometry=KVGeometry(layers, loaded.geometry.vocab_size),
        origin=Origin.DECLARED,
    )


def tolerance(loaded: LoadedModel, largest: float) -> float:
    """Return by how much KV or logits of a right conversion may differ, where none is above `largest`.

    A product of n terms rounds by about sqrt(n) units of float32 whichever order it is summed in; each layer
    adds as much again to what all before it have amplified.
    """
    config: Any = loaded.config.get_text_config(decoder=True)
    terms = max(config.hidden_size, config.intermediate_size)
    return float(_GROWTH * config.num_hidden_layers * terms**0.5 * _UNIT * largest)


def check(loaded: LoadedModel, folder: Path, layers: Sequence[Range], facts: Facts) -> None:
    """Run a short prompt through both, on the processor and in float32.

    Raises: `UnsupportedModel` that names the layer that differs, both values and the bound.
    """
    trial = [(11 + 7919 * index) % loaded.geometry.vocab_size for index in range(_TRIAL_TOKENS)]
    device = runtime.Device("CPU", "f32", 1)
    models = [device.read(folder / part_file(part)) for part in range(len(layers))]
    one = compile_pass(device, models, layers, _TRIAL_TOKENS, facts.hidden_size)
    found, logits = rows_of(one, trial)
    with torch.inference_mode():
        output = loaded.model(input_ids=torch.tensor([trial]), use_cache=True, logits_to_keep=1)
    caches = [rows for layer in output.cache.layers for rows in (layer.keys, layer.values)]
    expected = [rows[0].transpose(0, 1).numpy() for rows in caches]
    pairs = [*zip(found, expected, strict=True), (logits[None], output.logits[0].numpy())]
    for index, (ours, theirs) in enumerate(pairs):
        # A windowed layer of transformers keeps the end.
        differs = float(np.abs(ours[-len(theirs) :] - theirs).max())
        bound = tolerance(loaded, float(np.abs(theirs).max()))
        if not differs <= bound:
            where = f"layer {index // 2}" if index < len(found) else "the logits"
            problem = f"converted, {where} differs by {differs:.2g}, rounding alone by {bound:.2g}"
            raise UnsupportedModel(str(loaded.config.model_type), (), problem)


def _decoder(loaded: LoadedModel) -> Any:
    """Return the stack of layers of a model that is known here."""
    kind = str(loaded.config.model_type)
    if kind not in FAMILIES:
        raise UnsupportedModel(kind, (), f"the OpenVINO engine converts {', '.join(FAMILIES)}")
    decoder: Any = loaded.model.model
    if len(decoder.layers) != len(loaded.geometry.layers):
        raise UnsupportedModel(kind, (), "the OpenVINO engine needs KV of every layer")
    return decoder


def _convert_part(loaded: LoadedModel, layers: Range, path: Path) -> None:
    part = Part(loaded, layers)
    hidden_size = _decoder(loaded).config.hidden_size
    if layers.start == 0:
        example, shapes = [torch.zeros((1, _EXAMPLE_TOKENS), dtype=torch.long)], [[1, -1]]
    else:
        example, shapes = [torch.zeros((1, _EXAMPLE_TOKENS, hidden_size))], [[1, -1, hidden_size]]
    if part.is_last:
        example, shapes = [*example, torch.tensor([1])], [*shapes, [1]]
    with torch.no_grad():
        runtime.convert(part, tuple(example), shapes, path)


class Part(nn.Module):
    """Some layers of a model, as they are traced."""

    def __init__(self, loaded: LoadedModel, layers: Range) -> None:
        super().__init__()
        model: Any = loaded.model
        decoder = _decoder(loaded)
        self.is_first = layers.start == 0
        self.is_last = layers.stop == len(decoder.layers)
        self._config = decoder.config
        self._layers = nn.ModuleList(decoder.layers[layers.start : layers.stop])
        self._rotary = decoder.rotary_emb
        self._embedding = decoder.embed_tokens if self.is_first else None
        self._norm = decoder.norm if self.is_last else None
        self._head = model.lm_head if self.is_last else None
        types = getattr(decoder.config, "layer_types", None)
        kinds: list[str | None] = list(types or ())[layers.start : layers.stop]
        self._kinds = kinds if decoder.config.model_type == _ROTATES_BY_KIND else [None] * len(layers)
        self._windows = [loaded.geometry.layers[layer].window for layer in layers]

    def forward(self, rows: Tensor, last_1: Tensor | None = None) -> tuple[Tensor, ...]:
        """See the module."""
        hidden_1TE = rows if self._embedding is None else self._embedding(rows)
        positions_1T = torch.arange(hidden_1TE.shape[1])[None]
        cache = _Recorder()
        for layer, kind, window in zip(self._layers, self._kinds, self._windows, strict=True):
            hidden_1TE = layer(
                hidden_1TE,
                attention_mask=_mask(window, positions_1T[0]),
                position_ids=positions_1T,
                cache=cache,
                position_embeddings=self._rotary(hidden_1TE, positions_1T, *([kind] if kind else [])),
            )
        if self._norm is None or self._head is None or last_1 is None:
            return (*cache.outputs, hidden_1TE)
        logits_V = self._head(self._norm(hidden_1TE.index_select(1, last_1)))[0, 0]
        cap = getattr(self._config, "final_logit_softcapping", None)
        return (*cache.outputs, logits_V if cap is None else torch.tanh(logits_V / cap) * cap)


def _mask(window: int | None, positions_T: Tensor) -> Tensor | None:
    """Return what each position of a windowed layer sees; None for all before it and itself."""
    if window is None:
        return None
    queries, keys = positions_T[:, None], positions_T[None, :]
    return ((keys <= queries) & (keys > queries - window))[None, None]


class _Recorder:
    """Stands in for a cache: every layer attends to its own rows only, and they are kept as outputs."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, _layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Take rows [1, H, T, D]."""
        self.outputs += [rows[0].transpose(0, 1).contiguous() for rows in (key, value)]
        return key, value

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Return the tokens before these; transformers asks."""
        return 0
