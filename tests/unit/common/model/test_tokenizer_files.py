"""Tests of `common/model/tokenizer_files.py`: ids are those of transformers, what is not obeyed is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.errors import ConfigError
from common.model.source import TinyFamily
from common.model.text import LONG_TEXT_CHARS, Tokenizer
from common.model.tiny import VOCAB_SIZE, make_byte_tokenizer, tiny_config
from common.model.tokenizer_files import FolderTokenizer, read_tokenizer
from tests.support.vocabularies import make_spaced_tokenizer

FAMILIES = [family.value for family in TinyFamily]
TEXTS = (
    "",
    "hi",
    "No. 1234567 costs 99 EUR, café ﬁne",
    "  two  spaces\n\n",
    "<bos>x",
    "é漢😀" * LONG_TEXT_CHARS,
)
CHAT = [{"role": "user", "content": "No. 1234567"}]


def save(folder: Path, family: str, tokenizer: PreTrainedTokenizerFast, **config: object) -> Path:
    """Write what a tokenizer is read from, with these keys in tokenizer_config.json; None takes one away."""
    tiny_config(TinyFamily(family)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit(folder / "tokenizer_config.json", **config)
    return folder


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None takes one away."""
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def read(folder: Path) -> FolderTokenizer:
    """Return what is read for a model of the tiny size."""
    return read_tokenizer("/m", folder, VOCAB_SIZE)


CLASSES = [
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "LlamaTokenizer",
]


@pytest.mark.parametrize("tokenizer_class", [*CLASSES, None])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_ids_are_those_of_transformers_whatever_class_is_named(
    tmp_path: Path, family: str, tokenizer_class: str | None
) -> None:
    """Row Y2: text and chat, short and long, also where tokenizer.json says to cut and to fill (Y1)."""
    save(tmp_path, family, make_byte_tokenizer(), tokenizer_class=tokenizer_class)
    edit(
        tmp_path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 258,
            "pad_type_id": 0, "pad_token": "<pad>",
        },
    )  # fmt: skip
    reference = AutoTokenizer.from_pretrained(tmp_path)

    tokenizer = Tokenizer(read(tmp_path).pretrained)

    assert [tokenizer.encode(text) for text in TEXTS if not text.startswith("<bos>")] == [
        reference(text)["input_ids"] for text in TEXTS if not text.startswith("<bos>")
    ]
    assert tokenizer.encode_chat(CHAT) == reference.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast", None])
def test_ids_of_a_vocabulary_with_spaces_are_those_of_transformers(
    tmp_path: Path, tokenizer_class: str | None
) -> None:
    """Llama's class builds its own rules for them."""
    save(tmp_path, "llama", make_spaced_tokenizer(), tokenizer_class=tokenizer_class)
    reference = AutoTokenizer.from_pretrained(tmp_path)

    tokenizer = Tokenizer(read(tmp_path).pretrained)

    assert [tokenizer.encode(text) for text in TEXTS] == [reference(text)["input_ids"] for text in TEXTS]


def test_rules_that_a_class_replaces_are_noted(tmp_path: Path) -> None:
    """The digits of this file go by threes, those of the class one by one."""
    backend = make_byte_tokenizer()
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    save(tmp_path, "qwen3", backend, tokenizer_class="Qwen2Tokenizer")

    notes = read(tmp_path).notes

    assert "transformers' Qwen2Tokenizer has its own normalizer and pre_tokenizer in place of" in notes[0]
    assert "tokenizer.json lacks '<|endoftext|>' (259): added by tokenizer_config.json or" in notes[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_that_are_obeyed_are_not_noted(tmp_path: Path, family: str) -> None:
    """Silence means that everything is as the files say."""
    assert read(save(tmp_path, family, make_byte_tokenizer())).notes == ()


def test_added_tokens_beyond_the_rows_are_noted(tmp_path: Path) -> None:
    """Row Y9: a trainer's own pad token may have no row; only prompts with it cannot be served."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens(["<a>", "<b>"])

    (note,) = read(save(tmp_path, "llama", tokenizer)).notes

    assert note.startswith("the model has 259 rows, none for '<a>' (259), '<b>' (260)")


BROKEN: dict[str, tuple[dict[str, object], str]] = {
    "more ids than rows": (
        {"vocab": {"a": 0, "b": VOCAB_SIZE}},
        "has token ids up to 259, the model has 259 rows",
    ),
    "no tokens": ({"vocab": {}}, "has no tokens"),
    "random ids": ({"dropout": 0.5}, "has dropout 0.5, which makes ids random"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tokenizer_that_cannot_serve_the_model_is_refused(tmp_path: Path, case: str) -> None:
    """The rule is the name of the case; the model is to blame, and not the text of some client."""
    changes, said = BROKEN[case]
    save(tmp_path, "llama", make_byte_tokenizer())
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    edit(tmp_path / "tokenizer.json", model={**model, **changes}, post_processor=None)

    with pytest.raises(ConfigError, match=said):
        read(tmp_path)


def test_token_around_every_text_needs_a_row(tmp_path: Path) -> None:
    """No text could be served."""
    with pytest.raises(ConfigError, match="puts token 256 around every text, the model has 256 rows"):
        read_tokenizer("/m", save(tmp_path, "llama", make_byte_tokenizer()), 256)


JINJA, CONFIG, LEGACY, EXTRA = (
    "chat_template.jinja", "tokenizer_config.json", "chat_template.json",
    "additional_chat_templates/default.jinja",
)  # fmt: skip

PLACES: dict[str, tuple[dict[str, object], str | None, list[str]]] = {
    "a file": ({JINJA: "J"}, "J", []),
    "the config": ({CONFIG: "C"}, "C", []),
    "a list of names": (
        {CONFIG: [{"name": "default", "template": "C"}, {"name": "rag", "template": "R"}]},
        "C",
        [],
    ),
    "a folder": ({EXTRA: "E"}, "E", []),
    "the same twice": ({JINJA: "J", CONFIG: "J"}, "J", []),
    "the older file": (
        {LEGACY: "L"},
        "L",
        ["the chat template is that of chat_template.json, which transformers reads for processors only"],
    ),
    "a file and the config": (
        {JINJA: "J", CONFIG: "C"},
        "J",
        ["tokenizer_config.json has another chat template than chat_template.jinja, which is used"],
    ),
    "the config and the older file": (
        {CONFIG: "C", LEGACY: "L"},
        "C",
        ["chat_template.json has another chat template than tokenizer_config.json, which is used"],
    ),
    "a folder and a file": (
        {EXTRA: "E", JINJA: "J"},
        "E",
        [f"chat_template.jinja has another chat template than {EXTRA}, which is used"],
    ),
    "names without a default": (
        {CONFIG: [{"name": "rag", "template": "R"}]},
        None,
        ["of the chat templates rag none is called default: chats are refused"],
    ),
    "none": ({}, None, []),
}


@pytest.mark.parametrize("case", PLACES)
def test_chat_template_is_found_in_each_of_its_places(tmp_path: Path, case: str) -> None:
    """Row Y4: of two transformers' choice is used and the other one is named."""
    places, used, notes = PLACES[case]
    save(tmp_path, "llama", make_byte_tokenizer())
    (tmp_path / JINJA).unlink()
    put(tmp_path, places)

    found = read(tmp_path)

    chosen = found.pretrained.chat_template
    assert (chosen.get("default") if isinstance(chosen, dict) else chosen) == used
    assert list(found.notes) == notes


def put(folder: Path, places: dict[str, Any]) -> None:
    """Write templates where they belong."""
    for place, template in places.items():
        if place.endswith(".json"):
            edit(folder / place, chat_template=template)
        else:
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(template)


@pytest.mark.parametrize("value", [5, {"default": 5}, [{"name": "default"}]])
def test_chat_template_that_is_no_text_is_refused(tmp_path: Path, value: object) -> None:
    """Else the first chat would find it."""
    save(tmp_path, "llama", make_byte_tokenizer())
    edit(tmp_path / LEGACY, chat_template=value)

    with pytest.raises(ConfigError, match=r"the chat template of chat_template\.json is no text"):
        read(tmp_path)
