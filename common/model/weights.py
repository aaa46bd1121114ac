"""Load the weights of a checkpoint into the model that its config describes, all of them and nothing else.

Theory of operation: transformers draws tensors that a checkpoint lacks at random, drops those that the model
has no place for, and says so in a table on stderr. Here a tensor that lacks, or has another shape, is
refused, and so is one that the model drops although it belongs to what the model computes: a bias or a norm
that its layers have not, a layer beyond the last. What belongs to another part (a vision tower, a draft head)
is named. Before memory is taken the config is held against the heads of the files: it may want little more
than these hold.

Not here: the files themselves (`common/model/folder/checkpoint.py`), what the config means (`describe.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from common.errors import ConfigError
from common.excerpt import excerpt
from common.model.folder.checkpoint import ADAPTER, Checkpoint
from common.model.library import blamed

_COMPUTED = (
    "inv_freq", "cos_cached", "sin_cached", "position_ids", "masked_bias", "attention.bias", "attn.bias",
)  # fmt: skip
"""Ends of names of tensors that older releases stored and every release computes anew."""


def load_weights(
    spec: str, folder: Path, config: PreTrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Return the model in evaluation mode, and what people should know about its weights.

    Raises ConfigError that names the tensor and what the files and the config say of it.
    """
    _check_heads(spec, checkpoint)
    _refuse_applied_adapter(spec, folder)
    with blamed(spec, folder):
        _check_size(spec, config, checkpoint, dtype)
    with blamed(spec, checkpoint.files[0] if len(checkpoint.files) == 1 else folder):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            # Reported like missing ones, and refused below; else the names stand in a table on stderr only.
            ignore_mismatched_sizes=True,
        )
    _refuse_missing(spec, report)
    notes = (*_unread(spec, model, report["unexpected_keys"]), *_tied(model))
    _refuse_infinite(spec, model)
    model.requires_grad_(False)
    return model.eval(), notes


def _check_heads(spec: str, checkpoint: Checkpoint) -> None:
    """Let the library check the head of each file: when it loads them all it does not say which is broken."""
    for path in checkpoint.files:
        with blamed(spec, path), safe_open(path, "pt"):
            pass


def _refuse_applied_adapter(spec: str, folder: Path) -> None:
    """Refuse an adapter that transformers would apply, since with peft installed it asks nobody."""
    if (folder / ADAPTER[0]).exists() and importlib.util.find_spec("peft") is not None:
        problem = f"{ADAPTER[0]} lies beside the weights and peft is installed, which would change them"
        raise ConfigError("model", spec, problem)


def _check_size(spec: str, config: PreTrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Refuse a config that wants far more than the files hold, by a model that takes no memory.

    What lacks little is loaded to learn its name.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted <= 2 * checkpoint.num_elements:
        return
    for name, parameter in model.named_parameters():
        stored = checkpoint.tensors.get(name)
        if stored is not None and stored.shape != tuple(parameter.shape):
            _refuse_shapes(spec, [(name, stored.shape, parameter.shape)])
    held = f"{len(checkpoint.tensors)} tensors of {checkpoint.num_elements} elements"
    raise ConfigError("model", spec, f"the checkpoint has {held}, its config describes {wanted} elements")


def _refuse_missing(spec: str, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError("model", spec, f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}")
    if report["mismatched_keys"]:
        _refuse_shapes(spec, sorted(report["mismatched_keys"]))


def _refuse_shapes(spec: str, other: list[tuple[str, Iterable[int], Iterable[int]]]) -> None:
    name, found, wanted = other[0]
    first = f"{name} is {list(found)}, its config says {list(wanted)}"
    raise ConfigError("model", spec, f"{len(other)} tensors have another shape, first {first}")


def _unread(spec: str, model: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Yield a note about tensors that the model has no place for; raises for those of its own parts."""
    unread = sorted(name for name in names if not name.endswith(_COMPUTED))
    for name in unread:
        if _is_part(model, name):
            raise ConfigError(
                "model", spec, f"the checkpoint has {excerpt(name)}, which its config leaves out"
            )
    if unread:
        yield f"{len(unread)} tensors are of no part of this model and not read, first {excerpt(unread[0])}"


def _is_part(model: nn.Module, name: str) -> bool:
    """Tell whether a tensor belongs to a layer, to one more of a list, or to a module that the model has."""
    module, is_in_layer = model, False
    parts = name.split(".")[:-1]
    for part in parts:
        child = module._modules.get(part)
        if child is None:
            return is_in_layer or isinstance(module, nn.ModuleList) or not module._modules
        is_in_layer |= isinstance(module, nn.ModuleList)
        module = child
    return bool(parts)


def _tied(model: PreTrainedModel) -> Iterator[str]:
    """Yield a note where a config ties two tensors and the checkpoint has both, unlike each other."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    says = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    if says and head is not None and head.weight.data_ptr() != embedding.weight.data_ptr():
        yield "tie_word_embeddings is true, the weights have an output head of their own: that one is used"


def _refuse_infinite(spec: str, model: nn.Module) -> None:
    """Refuse weights that are no numbers, in the type they were loaded in: their answers would be noise."""
    for name, parameter in model.named_parameters():
        # Least and largest are NaN when one value is; a fraction of the time of looking at each value.
        if parameter.numel() and not all(bool(end.isfinite()) for end in parameter.detach().aminmax()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError("model", spec, f"{name} has values that are no finite numbers in {dtype}")
