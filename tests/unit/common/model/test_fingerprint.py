"""Tests of common/model/fingerprint.py."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from common.model.fingerprint import config_fields, fingerprint, weights_digest
from common.model.progress import shown_progress
from common.model.source import TinyFamily
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config


def make_model(*, tied: bool = False) -> PreTrainedModel:
    """Return a tiny model of which every test may change its own copy."""
    config = tiny_config(TinyFamily.LLAMA)
    config.tie_word_embeddings = tied
    return make_tiny(config, 3, torch.float32)


def test_copy_in_another_folder_and_sharding_is_the_same_model(tmp_path: Path) -> None:
    """Digests are by content: neither the folder nor the number of files changes them."""
    model, tokenizer = make_model(), make_byte_tokenizer()
    with shown_progress(False):
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        tokenizer.save_pretrained(tmp_path)
        copy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert fingerprint(copy, AutoTokenizer.from_pretrained(tmp_path)) == fingerprint(model, tokenizer)


def test_choice_of_attention_kernel_is_the_same_model() -> None:
    """How attention is computed is no property of the model."""
    model, tokenizer = make_model(), make_byte_tokenizer()
    before = fingerprint(model, tokenizer)

    model.set_attn_implementation("eager")

    assert fingerprint(model, tokenizer) == before


def test_one_changed_element_changes_the_weights_only() -> None:
    """A single flipped element of a single tensor is another model."""
    model, tokenizer = make_model(), make_byte_tokenizer()
    before = fingerprint(model, tokenizer)

    model.model.layers[2].self_attn.k_proj.weight[5, 7] += 0.25
    after = fingerprint(model, tokenizer)

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

    assert [key for key, _ in set(config_fields(before)) ^ set(config_fields(after))] == [
        "rope_parameters"
    ] * 2


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

    assert fingerprint(model, changed).tokenizer != fingerprint(model, make_byte_tokenizer()).tokenizer


def test_padding_of_an_earlier_call_is_no_part_of_the_tokenizer() -> None:
    """State that a call left in the backend does not make another tokenizer."""
    model, used = make_model(), make_byte_tokenizer()

    used(["a", "longer"], padding=True, truncation=True, max_length=4)

    assert fingerprint(model, used) == fingerprint(model, make_byte_tokenizer())
