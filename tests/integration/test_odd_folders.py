"""A folder as people have it: by every route the tokens of transformers' `generate` on the same folder.

Prefill and decode read copies that differ in what changes no number.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.model.folder.source import TinyFamily
from common.model.progress import shown_progress
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config
from decode_service import app as decode_app
from kvspan import cli
from kvspan.commands.command import EXIT_OK
from prefill_service import app as prefill_app
from tests.support.cases import prompt_of
from tests.support.pair import MODES, make_configs, running_pair

NUM_TOKENS = 6
LENGTHS = (1, 65, 200)
Change = Callable[[Path], object]


def make_folder(folder: Path, family: TinyFamily = TinyFamily.LLAMA, **save: Any) -> Path:
    """Write a tiny checkpoint."""
    with shown_progress(False):
        make_tiny(tiny_config(family), 5, torch.float32).save_pretrained(folder, **save)
    make_byte_tokenizer().save_pretrained(folder)
    return folder


def set_keys(*without: str, **keys: Any) -> Change:
    """Return what changes keys of the config and drops others."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in without}))

    return change


def drop_head(folder: Path) -> None:
    """Tie the embeddings, as a checkpoint that stores them once."""
    set_keys(tie_word_embeddings=True)(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


OLD_KEYS = set_keys(
    "rope_parameters", "dtype", "head_dim",
    rope_theta=10000.0, rope_scaling=None, torch_dtype="float32", is_decoder=False, add_cross_attention=False,
    pruned_heads={}, output_scores=False, top_k=50, architectures=["LlamaForCausalLM"], sep_token_id=None,
)  # fmt: skip
TRIFLES = set_keys(
    use_cache=False, return_dict=False, output_hidden_states=True, note="a copy", _name_or_path="/x",
    eos_token_id=7, attn_implementation="flash_attention_2",
)  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

ODD: dict[str, Change] = {
    "older release": OLD_KEYS,
    "tied, stored once": drop_head,
    "yarn": set_keys("rope_parameters", rope_theta=500.0, rope_scaling=YARN, max_position_embeddings=64),
    "linear": set_keys("rope_parameters", rope_scaling={"type": "linear", "factor": 2.0}),
    "stored in bfloat16": lambda folder: save_file(
        {name: one.bfloat16() for name, one in load_file(folder / "model.safetensors").items()},
        folder / "model.safetensors",
        {"format": "pt"},
    ),
}


def generated(folder: Path) -> list[tuple[int, ...]]:
    """Return what transformers answers, from the folder as it is."""
    with shown_progress(False):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for length in LENGTHS:
        ids = torch.tensor([prompt_of(length)])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
            eos_token_id=[], pad_token_id=258,
        )  # fmt: skip
        answers.append(tuple(output[0, length:].tolist()))
    return answers


@pytest.mark.parametrize("odd", ODD)
async def test_odd_folder_answers_as_transformers_by_every_route(odd: str, tmp_path: Path) -> None:
    """Rows Y5 and Y10: prefill reads a copy that differs in trifles, and the pair fits."""
    ours = make_folder(tmp_path / "decode")
    ODD[odd](ours)
    theirs = shutil.copytree(ours, tmp_path / "prefill")
    TRIFLES(theirs)
    prefill, decode = make_configs(tmp_path, str(ours), max_context_tokens=256 if odd == "yarn" else 0)
    expected = generated(ours)

    async with running_pair(replace(prefill, model=str(theirs)), decode) as pair:
        for route, modes in (("remote", MODES), ("local", (None,))):
            for mode in modes:
                options = {"route": route} | ({"transfer": mode} if mode else {})
                answers = [await pair.ask(prompt_of(length), NUM_TOKENS, **options) for length in LENGTHS]
                assert [tuple(one.token_ids) for one in answers] == expected, (route, mode)


@pytest.mark.parametrize(("wanted", "told"), [(0, 64), (200, 200), (256, 256)])
async def test_context_reaches_as_far_as_the_flag_says(
    tmp_path: Path, wanted: int, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row Y6: 64 positions that yarn stretches by 4; without the flag 64, with it up to 256; told."""
    folder = make_folder(tmp_path / "model")
    ODD["yarn"](folder)
    configs = make_configs(tmp_path, str(folder), max_context_tokens=wanted)

    async with running_pair(*configs) as pair:
        arguments = ["check", f"--decode={pair.decode_address}", f"--prefill={pair.prefill_address}"]
        code = await asyncio.to_thread(cli.main, arguments)

    assert code == EXIT_OK
    said = f"longest prompt: decode takes {told} tokens with its answer, prefill {told} tokens"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "load",
    [lambda configs: prefill_app.load(configs[0]), lambda configs: decode_app.load(configs[1])],
    ids=["prefill", "decode"],
)
def test_context_beyond_the_factor_is_refused_by_both(
    tmp_path: Path, load: Callable[[tuple[Any, Any]], object]
) -> None:
    """Row Y6: positions that no encoding was made for are noise, whoever computes them."""
    folder = make_folder(tmp_path / "model")
    ODD["yarn"](folder)

    with pytest.raises(ConfigError) as caught:
        load(make_configs(tmp_path, str(folder), max_context_tokens=257))

    assert (caught.value.field, caught.value.value) == ("max_context_tokens", 257)
    assert caught.value.problem.endswith("is 64, and the positions of this model reach 256 at most")
