"""Encodings of positions are exact in chunks, or refused; how far they reach is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PhiConfig

from common.errors import UnsupportedModel
from common.kv.geometry import DType
from common.model.describe import describe
from common.model.forward.prefill import ChunkedPrefill
from common.model.positions import check_positions, check_rotation, context_limits, ignored_keys
from common.model.tiny import make_tiny
from tests.support.models import RecordingWriter, dense, make_prompt, never

SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64,
}  # fmt: skip

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_config(**rope: Any) -> LlamaConfig:
    """Return a tiny config whose positions are given as older releases wrote them."""
    return LlamaConfig(**SIZES, rope_theta=500.0, rope_scaling=rope or None)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"type": "linear", "factor": 2.5},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4, "attention_factor": 1.3, "beta_fast": 20, "truncate": False},
        LLAMA3,
    ],
    ids=["plain", "linear", "yarn", "yarn-new", "llama3"],
)
def test_prompt_in_chunks_is_the_whole_prompt(rope: dict[str, Any]) -> None:
    """Old and new spelling alike; three chunks give the logits of transformers' one forward, beyond the
    original positions too. The tolerance is the order of sums in float32."""
    config = make_config(**rope)
    model = make_tiny(config, 3, torch.float32)
    prompt = make_prompt(60)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].numpy()

    geometry = describe(config, DType.FLOAT32)
    prefill = ChunkedPrefill(model, geometry, 24, 64)
    logits = prefill.prefill(prompt, dense(geometry, 60), RecordingWriter(), never)

    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_parameters.rope_type dynamic depends on the longest"),
        (
            {"rope_type": "magic", "factor": 2.0},
            "rope_parameters.rope_type 'magic' is unknown; there are default,",
        ),
        ({"rope_type": "linear", "factor": 0.5}, "rope_parameters.factor is 0.5, not a number from 1"),
        ({"rope_type": "yarn", "factor": None}, "rope_parameters.factor is None, not a number from 1"),
        ({"rope_type": "yarn", "factor": "4"}, "rope_parameters.factor is '4', not a number from 1"),
        (
            {"rope_type": "yarn", "factor": 2, "mscale": -1},
            "rope_parameters.mscale is -1, not a number from 0",
        ),
    ],
)
def test_encoding_that_is_not_exact_is_refused_by_its_key(rope: dict[str, Any], said: str) -> None:
    """A library warns of most and computes with them."""
    config = make_config()
    config.rope_parameters = {"rope_theta": 500.0, **rope}

    with pytest.raises(UnsupportedModel) as caught:
        check_positions("llama", config)
    assert said in caught.value.problem


def test_encoding_of_each_kind_of_layer_is_looked_at() -> None:
    """Windowed and full layers may encode positions differently."""
    config = Gemma3TextConfig(num_hidden_layers=6)
    assert config.rope_parameters is not None
    config.rope_parameters["full_attention"]["rope_type"] = "longrope"

    with pytest.raises(UnsupportedModel, match=r"rope_parameters\.full_attention\.rope_type longrope"):
        check_positions("gemma3", config)


def test_part_of_a_head_that_a_type_does_not_rotate_alone_is_refused() -> None:
    """Phi rotates a part of each head, Llama all of it whatever its config says."""
    partial, whole = PhiConfig(**SIZES, partial_rotary_factor=0.5), make_config()
    whole.rope_parameters = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}

    check_rotation(make_tiny(partial, 3, torch.float32), partial)
    with pytest.raises(UnsupportedModel, match=r"rope_parameters\.partial_rotary_factor is 0\.5, which this"):
        check_rotation(make_tiny(whole, 3, torch.float32), whole)


@pytest.mark.parametrize(
    ("rope", "limits"),
    [
        ({}, (64, 64)),
        ({"type": "linear", "factor": 2.5}, (64, 160)),
        # Row Y6: the original positions are those of the config unless it says others.
        ({"type": "yarn", "factor": 4.0}, (64, 256)),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, (64, 128)),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, (64, 64)),
        (LLAMA3, (64, 64)),
    ],
)
def test_positions_reach_as_far_as_the_config_says_or_the_factor(
    rope: dict[str, Any], limits: tuple[int, int]
) -> None:
    """The first number is the limit, the second how far --max-context-tokens may raise it."""
    assert context_limits(make_config(**rope)) == limits


def test_key_that_an_encoding_does_not_know_is_named() -> None:
    """A typing error in a factor changes nothing, and nobody says so."""
    config = make_config(type="linear", factor=2.0, faktor=4.0)

    assert ignored_keys(config) == ("rope_parameters.faktor",)
    assert ignored_keys(make_config(**LLAMA3)) == ()
