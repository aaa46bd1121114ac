"""Text and chats for folders as people have them: by every route what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from common.model.folder.source import TinyFamily
from common.model.progress import shown_progress
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config
from tests.support.pair import make_configs, running_pair
from tests.support.vocabularies import edit_json, make_spaced_tokenizer, save_tokenizer

NUM_TOKENS = 12

NUM_ROWS = 300
"""More than there are ids: an answer may have tokens that are no text (Y9)."""

TEXTS = ("No. 1234567 costs 99 EUR, café ﬁne\n", "hi", "x" * 150)
CHATS = (
    [{"role": "user", "content": "No. 1234567"}],
    [{"role": "user", "content": "a <eos></s> b"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon "}],
)
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"

CUT = {
    "truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 258,
        "pad_type_id": 0, "pad_token": "<pad>",
    },
}  # fmt: skip
DEFAULTS = {"do_sample": True, "top_p": 0.5, "repetition_penalty": 3.0, "suppress_tokens": [*range(100)]}


def save_legacy_template(folder: Path) -> None:
    """Leave the template where processors have it."""
    edit_json(folder / "chat_template.json", chat_template=(folder / "chat_template.jinja").read_text())


ODD: dict[str, tuple[str, Callable[[], PreTrainedTokenizerFast], Callable[[Path], object]]] = {
    "cut and filled (Y1)": ("llama", make_byte_tokenizer, lambda it: edit_json(it / "tokenizer.json", **CUT)),
    "rules of a class (Y2)": (
        "qwen3",
        make_byte_tokenizer,
        lambda it: edit_json(it / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer"),
    ),
    "sampling defaults (Y3)": (
        "llama",
        make_byte_tokenizer,
        lambda it: (it / "generation_config.json").write_text(json.dumps(DEFAULTS)),
    ),
    "a template in two places (Y4)": ("gemma3", make_byte_tokenizer, save_legacy_template),
    "words with spaces (Y16)": (
        "llama",
        make_spaced_tokenizer,
        lambda it: edit_json(it / "tokenizer_config.json", tokenizer_class="LlamaTokenizer"),
    ),
}


def make_folder(folder: Path, odd: str) -> Path:
    """Write a tiny checkpoint with an odd tokenizer or template."""
    family, make_tokenizer, change = ODD[odd]
    tokenizer, config = make_tokenizer(), tiny_config(TinyFamily(family))
    tokenizer.chat_template, config.vocab_size = TEMPLATE, NUM_ROWS
    save_tokenizer(folder, family, tokenizer)
    with shown_progress(False):
        make_tiny(config, 5, torch.float32).save_pretrained(folder)
    change(folder)
    return folder


def make_prompts(folder: Path) -> list[tuple[dict[str, Any], list[int]]]:
    """Return what a client sends, and the ids that transformers makes of it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts: list[tuple[dict[str, Any], list[int]]] = [
        ({"prompt": text}, tokenizer(text)["input_ids"]) for text in TEXTS
    ]
    for chat in CHATS:
        is_open = chat[-1]["role"] == "assistant"
        ids = tokenizer.apply_chat_template(
            chat,
            add_generation_prompt=not is_open,
            continue_final_message=is_open,
            sanitize_control_tokens=True,
            return_dict=False,
        )
        prompts.append(({"messages": chat}, ids))
    return prompts


def added_text(folder: Path, prompt: list[int], answer: tuple[int, ...]) -> str:
    """Return what transformers says that an answer adds to its prompt, up to what is no text at its end."""
    decode = partial(
        AutoTokenizer.from_pretrained(folder).decode,
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    before, whole = str(decode(prompt)), str(decode([*prompt, *answer]))
    if not whole.startswith(before):
        # Bytes that are no text after a run of byte tokens: decoded as a whole, the prompt is spoilt too.
        before, whole = "", str(decode(answer))
    return whole.removeprefix(before).rstrip("\ufffd")


def generated(folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Return what transformers answers, without the defaults of the folder."""
    with shown_progress(False):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=0)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            use_cache=True,
        )
        answers.append(tuple(output[0, len(prompt) :].tolist()))
    return answers


@pytest.mark.parametrize("odd", ODD)
async def test_text_and_chats_are_read_and_answered_as_by_transformers(odd: str, tmp_path: Path) -> None:
    """The same ids, as many of them and the same answers, computed here and there; their text fits (Y13)."""
    folder = make_folder(tmp_path / "model", odd)
    prompts = make_prompts(folder)
    expected = generated(folder, [ids for _, ids in prompts])
    texts = [added_text(folder, ids, answer) for (_, ids), answer in zip(prompts, expected, strict=True)]

    async with running_pair(*make_configs(tmp_path, str(folder))) as pair:
        for route in ("remote", "local"):
            answers = [
                await pair.client.complete(
                    **given, max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, route=route
                )
                for given, _ in prompts
            ]
            assert [one.token_ids for one in answers] == expected, route
            assert [one.text.rstrip("\ufffd") for one in answers] == texts, route
            assert any(token >= NUM_ROWS - 40 for one in answers for token in one.token_ids)
            assert [one.usage.prompt_tokens for one in answers] == [len(ids) for _, ids in prompts]
