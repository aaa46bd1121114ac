"""Tests of common/model/tiny.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.model.folder.source import TinyFamily
from common.model.tiny import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    make_byte_tokenizer,
    make_tiny,
    tiny_config,
    tiny_gemma3_config,
)

TOKENIZER = make_byte_tokenizer()


@pytest.mark.parametrize("family", list(TinyFamily))
def test_greedy_output_wanders_over_tokens(family: TinyFamily) -> None:
    """Sixteen greedy tokens are no constant, so that a wrong key shows in the tokens."""
    model = make_tiny(tiny_config(family), 0, torch.float32)
    prompt = torch.tensor([TOKENIZER.encode("a prompt of some words")])

    output = model.generate(
        prompt, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=PAD_ID
    )

    assert len(set(output[0, prompt.shape[1] :].tolist())) >= 5


@pytest.mark.parametrize("family", list(TinyFamily))
def test_output_depends_on_the_first_token(family: TinyFamily) -> None:
    """A full-attention layer makes the last logits depend on a token farther back than any window."""
    model = make_tiny(tiny_config(family), 0, torch.float32)
    rows = torch.tensor([[BOS_ID, byte, *range(60)] for byte in (3, 5)])

    logits = model(input_ids=rows, logits_to_keep=1).logits[:, -1]

    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    """Weights are a function of config and seed."""
    config = tiny_config(TinyFamily.QWEN3)
    first, again, other = (make_tiny(config, seed, torch.float32).state_dict() for seed in (7, 7, 8))

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_global_random_state_is_left_alone() -> None:
    """Making a model draws nothing from the process-wide generator."""
    torch.manual_seed(11)
    before = torch.get_rng_state()

    make_tiny(tiny_config(TinyFamily.LLAMA), 0, torch.float32)

    assert torch.equal(torch.get_rng_state(), before)


def test_bfloat16_weights_are_the_rounded_float32_ones() -> None:
    """The dtype is applied after drawing, so that dtypes differ by rounding only."""
    config = tiny_config(TinyFamily.LLAMA)
    wide = make_tiny(config, 0, torch.float32).state_dict()
    narrow = make_tiny(config, 0, torch.bfloat16).state_dict()

    assert all(torch.equal(wide[name].to(torch.bfloat16), narrow[name]) for name in wide)


def test_window_of_the_hybrid_config_is_the_one_asked_for() -> None:
    """Layers 0 to 4 slide over the given window and layer 5 sees all."""
    config = tiny_gemma3_config(window=24)

    assert config.sliding_window == 24
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize("family", list(TinyFamily))
def test_long_prompts_fit(family: TinyFamily) -> None:
    """Every tiny model takes at least 4,096 positions and speaks the byte vocabulary."""
    config = tiny_config(family)

    assert config.max_position_embeddings >= 4096
    assert config.vocab_size == VOCAB_SIZE == len(TOKENIZER)
    assert config.eos_token_id == TOKENIZER.eos_token_id == EOS_ID


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    """Encoding puts <bos> before the bytes of the text, and decoding gives the text back."""
    ids = TOKENIZER.encode("\x01" + text)

    assert ids == [BOS_ID, 1, *text.encode()]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "\x01" + text
