"""All of a checkpoint is loaded into all of a model, or the tensor is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError
from common.model.folder.source import TinyFamily
from common.model.loader import LoadedModel, load_model
from common.model.progress import shown_progress
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config

LAYER = "model.layers.3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of the tiny Llama."""
    with shown_progress(False):
        make_tiny(tiny_config(TinyFamily.LLAMA), 5, torch.float32).save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    """Load a folder."""
    return load_model(str(folder), dtype, progress=False)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the weights of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    """Rewrite the config of a folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _put(name: str, value: float = 0.0) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.full((36,), value)})


def _spoil(value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[f"{LAYER}.mlp.up_proj.weight"][5].fill_(value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{LAYER}.self_attn.k_proj.weight"), f"lacks 1 tensors, first {LAYER}.self_attn.k"),
        # Without a tie nothing stands in for it.
        (lambda t: t.pop("lm_head.weight"), "lacks 1 tensors, first lm_head.weight"),
        (
            _put(f"{LAYER}.self_attn.k_proj.bias"),
            f"has {LAYER}.self_attn.k_proj.bias, which its config leaves",
        ),
        (
            _put("model.layers.5.mlp.up_proj.weight"),
            "has model.layers.5.mlp.up_proj.weight, which its config",
        ),
        (_put(f"{LAYER}.self_attn.q_norm.weight"), f"has {LAYER}.self_attn.q_norm.weight, which its config"),
        (_put("lm_head.lora_A.weight"), "has lm_head.lora_A.weight, which its config leaves out"),
        (_put(f"{LAYER}.self_attn.k_scale"), f"has {LAYER}.self_attn.k_scale, which its config leaves out"),
        (
            _spoil(float("nan")),
            f"{LAYER}.mlp.up_proj.weight has values that are no finite numbers in float32",
        ),
        (_spoil(float("-inf")), f"{LAYER}.mlp.up_proj.weight has values that are no finite"),
    ],
)
def test_tensor_that_makes_another_model_is_named(
    folder: Path, change: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    """Transformers draws what lacks at random, drops what it has no place for, and answers all the same."""
    change_tensors(folder, change)

    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert said in caught.value.problem


def test_weights_beyond_the_range_of_the_type_are_refused(folder: Path) -> None:
    """What is finite in the file may be infinite in --dtype."""
    change_tensors(folder, _spoil(1e6))

    assert load(folder, "bfloat16").notes == ()
    with pytest.raises(ConfigError, match="no finite numbers in float16"):
        load(folder, "float16")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"intermediate_size": 77},
            r"tensors have another shape, first model.*mlp.* is \[.*\], its config .*77",
        ),
        ({"vocab_size": 10_000}, r"embed_tokens\.weight is \[259, 72\], its config says \[10000, 72\]"),
        ({"num_hidden_layers": 4}, r"has model\.layers\.4\..*, which its config leaves out"),
        ({"num_hidden_layers": 6}, r"lacks 9 tensors, first model\.layers\.5\."),
        ({"num_hidden_layers": 40}, r"has 48 tensors of \d+ elements, its config describes \d+ elements"),
        ({"attention_bias": True}, r"lacks 20 tensors, first model\.layers\.0\.self_attn\.k_proj\.bias"),
    ],
)
def test_config_of_another_model_is_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    """A config beside the wrong weights; one that wants far more of them is refused before it gets memory."""
    change_config(folder, **changes)

    with pytest.raises(ConfigError, match=said):
        load(folder)


def test_part_of_another_head_is_named_and_computed_tensors_are_not(folder: Path) -> None:
    """A draft head is no part of this model; frequencies of rotations are made anew by every release."""
    change_tensors(folder, _put("mtp.head.weight"))
    change_tensors(folder, _put(f"{LAYER}.self_attn.rotary_emb.inv_freq"))

    assert load(folder).notes == (
        "1 tensors are of no part of this model and not read, first mtp.head.weight",
    )


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_tied_tensor_may_be_stored_under_either_name(folder: Path, stored: str) -> None:
    """One matrix is input and output, however often it lies in the file."""
    change_config(folder, tie_word_embeddings=True)

    def tie(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name, other in (("lm_head.weight", "embedding"), ("model.embed_tokens.weight", "head")):
            if stored == other:
                del tensors[name]

    change_tensors(folder, tie)
    loaded = load(folder)
    model: Any = loaded.model

    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert loaded.notes == ()


def test_head_of_its_own_wins_over_a_tie_and_is_said(folder: Path) -> None:
    """A fine-tune that freed the head and left the key: the head is what was trained."""
    change_config(folder, tie_word_embeddings=True)

    (note,) = load(folder).notes

    assert note.startswith("tie_word_embeddings is true, the weights have an output head of their own")


def test_weights_of_several_files_name_the_broken_one(folder: Path) -> None:
    """The library says only that a head is too large."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    head = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}'
    (folder / "b.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"." * 12)
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigError, match=r"cannot load .*/b\.safetensors: SafetensorError"):
        load(folder)


def test_adapter_is_refused_where_a_library_would_apply_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Row Y8: whether peft is installed must not change the answers."""
    (folder / "adapter_config.json").write_text("{}")
    notes = load(folder).notes
    packages = tmp_path_factory.mktemp("packages")
    (packages / "peft.py").touch()
    monkeypatch.syspath_prepend(packages)

    assert notes == ("the adapter beside the weights (adapter_config.json) is not applied",)
    with pytest.raises(
        ConfigError, match=r"adapter_config\.json lies beside the weights and peft is installed"
    ):
        load(folder)
