"""Tests of common/model/fingerprint.py."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from common.model.describe import use_plainly
from common.model.fingerprint import config_fields, fingerprint, tokenizer_fields, weights_digest
from common.model.folder.source import TinyFamily
from common.model.progress import shown_progress
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config
from common.session.identity import ModelFingerprint


def make_model(*, tied: bool = False) -> PreTrainedModel:
    """Return a tiny model of which every test may change its own copy."""
    config = tiny_config(TinyFamily.LLAMA)
    config.tie_word_embeddings = tied
    return make_tiny(config, 3, torch.float32)


def digests(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> ModelFingerprint:
    """Return the digests of a model and a tokenizer."""
    return fingerprint(model, config_fields(model.config), tokenizer_fields(tokenizer))


def test_copy_in_another_folder_and_sharding_is_the_same_model(tmp_path: Path) -> None:
    """Digests are by content: neither the folder nor the number of files changes them."""
    model, tokenizer = make_model(), make_byte_tokenizer()
    with shown_progress(False):
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        tokenizer.save_pretrained(tmp_path)
        copy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert digests(copy, AutoTokenizer.from_pretrained(tmp_path)) == digests(model, tokenizer)


def test_choice_of_attention_kernel_is_the_same_model() -> None:
    """How attention is computed is no property of the model."""
    model, tokenizer = make_model(), make_byte_tokenizer()
    before = digests(model, tokenizer)

    model.set_attn_implementation("eager")

    assert digests(model, tokenizer) == before


def test_one_changed_element_changes_the_weights_only() -> None:
    """A single flipped element of a single tensor is another model."""
    model, tokenizer = make_model(), make_byte_tokenizer()
    before = digests(model, tokenizer)

    model.model.layers[2].self_attn.k_proj.weight[5, 7] += 0.25
    after = digests(model, tokenizer)

    assert after.weights != before.weights
    assert (after.config, after.tokenizer) == (before.config, before.tokenizer)


def test_swapped_tensors_change_the_weights() -> None:
    """A tensor's name is part of the digest, so that equal bytes in other places differ."""
    model = make_model()
    first, second = model.model.layers[0].self_attn.k_proj, model.model.layers[1].self_attn.k_proj
    before = weights_digest(model)

    first.weight, second.weight = second.weight, first.weight

    assert weights_digest(model) != before


def test_tied_tensor_counts_once() -> None:
    """One tensor under two names is hashed under the first, as if the second were absent."""

    class Pair(torch.nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            torch.nn.init.ones_(self.embed.weight)
            if tied:
                self.head = torch.nn.Linear(3, 5, bias=False)
                self.head.weight = self.embed.weight

    assert weights_digest(Pair(tied=True)) == weights_digest(Pair(tied=False))


def test_tied_model_keeps_its_digest_over_saving(tmp_path: Path) -> None:
    """A checkpoint that stores a tied tensor once is the model it was saved from."""
    model = make_model(tied=True)
    with shown_progress(False):
        model.save_pretrained(tmp_path)
        copy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    assert weights_digest(copy) == weights_digest(model)


def test_changed_config_is_named_by_its_key() -> None:
    """Every key that counts is listed with its value, so that two peers can name a difference."""
    before, after = tiny_config(TinyFamily.LLAMA), tiny_config(TinyFamily.LLAMA)
    after.rope_parameters["rope_theta"] = 5.0

    assert changed_keys(before, after) == {"rope_parameters"}


def changed_keys(before: PreTrainedConfig, after: PreTrainedConfig) -> set[str]:
    """Return the keys in which two configs differ."""
    return {key for key, _ in set(config_fields(before)) ^ set(config_fields(after))}


def read_again(config: PreTrainedConfig, changes: dict[str, Any], *dropped: str) -> PreTrainedConfig:
    """Return a config as a folder has it, with some keys changed and some left out."""
    written = {key: value for key, value in config.to_dict().items() if key not in dropped}
    again: PreTrainedConfig = type(config)(**written | changes)
    return again


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {key: value}
            for key, value in {
                "use_cache": False, "transformers_version": "4.0", "_name_or_path": "x", "dtype": "float16",
                "torch_dtype": "float16", "output_attentions": True, "output_hidden_states": True,
                "return_dict": False, "is_decoder": False, "initializer_range": 0.5, "attention_dropout": 0.5,
                "pretraining_tp": 2,
                "bos_token_id": 5, "eos_token_id": [5, 6], "pad_token_id": None, "problem_type": "regression",
                "architectures": ["LlamaModel"], "chunk_size_feed_forward": 3, "id2label": {"0": "a"},
                "note": "of the author", "run": 7, "tie_encoder_decoder": False,
                "auto_map": {"AutoConfig": "x.Y"},
                "is_causal": True, "max_position_embeddings": 4096, "rms_norm_eps": 1.0e-6,
                "rope_scaling": None,
            }.items()
        ),
        {"use_cache": False, "note": None, "hidden_size": 72},
    ],
    ids=",".join,
)  # fmt: skip
def test_key_that_changes_no_number_is_no_difference(changes: dict[str, Any]) -> None:
    """Row Y10: copies of one model that differ in trifles fit each other, and give the same logits."""
    before = tiny_config(TinyFamily.LLAMA)
    after = read_again(before, changes)
    use_plainly(after)

    assert changed_keys(before, after) == set()
    token = torch.tensor([[5, 9]])
    logits = [make_tiny(config, 3, torch.float32)(token).logits for config in (before, after)]
    assert torch.equal(*logits)


OTHER_VALUES: dict[str, Any] = {
    "hidden_act": "gelu", "hidden_activation": "relu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    "layer_types": ["sliding_attention", "full_attention"] * 3, "use_bidirectional_attention": True,
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0,
}  # fmt: skip


@pytest.mark.parametrize("family", TinyFamily)
def test_every_other_declared_key_is_a_difference(family: TinyFamily) -> None:
    """Row N1: what a model type declares and is not known to change nothing counts, one key at a time."""
    before = tiny_config(family)
    counted = dict(config_fields(before))
    for key in counted.keys() - {"model_type"}:
        value = getattr(before, key)
        after = tiny_config(family)
        setattr(after, key, OTHER_VALUES[key] if key in OTHER_VALUES else _another(value))
        assert key in changed_keys(before, after), key
    declared = {field.name for field in dataclasses.fields(before)} - {field.name for field in BASE_FIELDS}
    assert declared - counted.keys() <= TRIFLES


def _another(value: Any) -> Any:
    return not value if isinstance(value, bool) else 2 * value


BASE_FIELDS = dataclasses.fields(PreTrainedConfig)
TRIFLES = {
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
    "pretraining_tp", "use_sliding_window", "max_window_layers", "sliding_window", "max_position_embeddings",
    "tie_word_embeddings",
}  # fmt: skip
"""Declared keys that do not count; a window that no layer has is none."""


def test_old_and_new_spelling_of_positions_are_one_model() -> None:
    """A copy that transformers 5 saved anew fits the one it was read from; 10000 is 10000.0."""
    new = tiny_config(TinyFamily.LLAMA)
    new.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    old = {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 10000}

    assert changed_keys(new, read_again(new, old, "rope_parameters")) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: setattr(tokenizer, "chat_template", "other"),
        lambda tokenizer: setattr(tokenizer, "eos_token", "<pad>"),
        lambda tokenizer: tokenizer.add_tokens(["word"]),
    ],
    ids=["chat template", "special id", "vocabulary"],
)
def test_changed_tokenizer_is_another_one(change: Callable[[object], object]) -> None:
    """Chat template, special ids and vocabulary are part of the tokenizer digest."""
    model = make_model()
    changed = make_byte_tokenizer()
    change(changed)

    assert digests(model, changed).tokenizer != digests(model, make_byte_tokenizer()).tokenizer


def test_changed_template_is_named_with_its_text() -> None:
    """Two peers can show where their templates differ, line endings too."""
    changed = make_byte_tokenizer()
    changed.chat_template = "{{ a }}\r\n"

    differing = set(tokenizer_fields(changed)) - set(tokenizer_fields(make_byte_tokenizer()))

    assert differing == {("chat_template", r'"{{ a }}\r\n"')}


def test_long_field_is_told_by_digest_and_length() -> None:
    """A vocabulary goes into no message; a peer whose own differs still differs in that field."""
    told = []
    for last in "xy":
        tokenizer = make_byte_tokenizer()
        tokenizer.chat_template = "a" * 70_000 + last
        told.append(dict(tokenizer_fields(tokenizer))["chat_template"])

    assert told[0] != told[1]
    assert all(value.startswith("70003 characters, xxh3-128 ") for value in told)


def test_padding_of_an_earlier_call_is_no_part_of_the_tokenizer() -> None:
    """State that a call left in the backend does not make another tokenizer."""
    model, used = make_model(), make_byte_tokenizer()

    used(["a", "longer"], padding=True, truncation=True, max_length=4)

    assert digests(model, used) == digests(model, make_byte_tokenizer())
