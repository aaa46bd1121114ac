"""A config.json that no model can be made from is refused from its text, by key and value, at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.model.folder.configuration import MAX_BYTES, MAX_DEPTH, read_config

SPEC = "given"
PLAIN = {
    "model_type": "llama",
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 259,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def refusal(folder: Path, content: str) -> str:
    """Return why a config.json is refused."""
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_config(SPEC, folder)
    assert (caught.value.field, caught.value.value) == ("model", SPEC)
    return caught.value.problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # Older releases and other families leave these to the model type.
        {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None},
        {"hidden_size": 80, "head_dim": 16},
        {"intermediate_size": [104] * 5, "sliding_window": 0},
        {"sliding_window": None, "layer_types": ["full_attention"] * 5},
        {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 2, 3]}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"time_step_limit": [0.0, float("inf")]},
        {"text_config": {"num_hidden_layers": 2}, "attention_mask_value": -3.4e38},
    ],
)
def test_what_people_have_is_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Null where a model type derives the value, layers that differ, old spellings."""
    config = {**PLAIN, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_config(SPEC, tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            ({"num_hidden_layers": value}, f"num_hidden_layers is {shown}, not a whole number from 1 to 4096")
            for value, shown in (
                (0, "0"), (-1, "-1"), (4097, "4097"), (5.0, "5.0"), (True, "true"), ("5", '"5"'),
                (None, "null"),
            )
        ),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0, not a whole number from 1"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, not a whole number from 1"),
        ({"text_config": {"hidden_size": -8}}, "text_config.hidden_size is -8, not a whole number from 1"),
        ({"intermediate_size": [104, 0]}, "intermediate_size is 0, not a whole number from 1"),
        ({"anything": -(10**99)}, f"anything is -1{'0' * 77}…, which is beyond 9007199254740992"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a finite number"),
        ({"scale": float("inf")}, "scale is inf, not a finite number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, not a number above 0"),
        ({"torch_dtype": "float8"}, 'torch_dtype is "float8", not one of bfloat16, float16,'),
        ({"dtype": 16}, "dtype is 16, not one of bfloat16, float16,"),
        ({"num_labels": 10**9}, "num_labels is 1000000000, not a whole number from 1 to 262144"),
        ({"num_codebooks": 10**9}, "num_codebooks is 1000000000, more than 262144"),
        ({"rope_scaling": False}, "rope_scaling is false, not an object"),
        ({"pad_token_id": 259}, "pad_token_id is 259, vocab_size is 259"),
        ({"text_config": []}, "text_config is [], not an object"),
        ({"layer_types": 5}, "layer_types is 5, not a list of names"),
        ({"architectures": "LlamaForCausalLM"}, 'architectures is "LlamaForCausalLM", not a list of names'),
        ({"sliding_window": True}, "sliding_window is true, not a whole number up to 2147483648"),
        ({"sliding_window": 10**12}, "sliding_window is 1000000000000, not a whole number up to"),
        ({"rope_theta": 0}, "rope_theta is 0, not a number above 0"),
        ({"text_config": {"rope_theta": "x"}}, 'text_config.rope_theta is "x", not a number above 0'),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, which does not divide num_attention_heads"),
        ({"hidden_size": 70}, "num_attention_heads is 6, which does not divide hidden_size, 70"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 5"),
        (
            {"rope_scaling": {"factor": 2}, "rope_parameters": {"factor": 4}},
            'rope_scaling is {"factor": 2}, rope_parameters is {"factor": 4}',
        ),
        ({"rope_parameters": {"rope_theta": 5}}, "rope_theta is 10000.0, rope_parameters.rope_theta is 5"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn"}},
            'rope_scaling.type is "linear", rope_type is "yarn"',
        ),
    ],
)  # fmt: skip
def test_absurd_or_contradictory_value_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """A library divides by zero, computes with NaN, or takes one of two values without a word."""
    content = json.dumps({**PLAIN, **changes})

    assert refusal(tmp_path, content).startswith(f"config.json: {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON: "),
        ("", "is no JSON: "),
        ("[1]", "is no JSON object but [1]"),
        ('{"a": 1, "a": 2}', '"a" is there twice, as 1 and 2'),
        ("[" * 100_000, "is no JSON: "),
        (f'{{"a": {"[" * MAX_DEPTH}{"]" * MAX_DEPTH}}}', f"a{'[0]' * (MAX_DEPTH - 1)} is more than 16 deep"),
        (" " * (MAX_BYTES + 1), f"is longer than {MAX_BYTES} bytes"),
    ],
    ids=["half", "empty", "list", "twice", "endless", "deep", "long"],
)
def test_text_is_read_within_bounds(tmp_path: Path, content: str, said: str) -> None:
    """A file of another kind, or one made to be expensive, ends in a line and not in memory."""
    assert refusal(tmp_path, content).startswith(f"config.json: {said}")
