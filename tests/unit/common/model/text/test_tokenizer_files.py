"""Tests of `common/model/text/tokenizer_files.py`: ids are those of transformers, else it is noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from common.errors import ConfigError
from common.model.folder.source import TinyFamily
from common.model.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from common.model.text.tokenizer_files import FolderTokenizer, read_tokenizer
from common.model.tiny import VOCAB_SIZE, make_byte_tokenizer
from tests.support.vocabularies import edit_json, make_spaced_tokenizer, save_tokenizer

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
    save_tokenizer(tmp_path, family, make_byte_tokenizer(), tokenizer_class=tokenizer_class)
    edit_json(
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
    save_tokenizer(tmp_path, "llama", make_spaced_tokenizer(), tokenizer_class=tokenizer_class)
    reference = AutoTokenizer.from_pretrained(tmp_path)

    tokenizer = Tokenizer(read(tmp_path).pretrained)

    assert [tokenizer.encode(text) for text in TEXTS] == [reference(text)["input_ids"] for text in TEXTS]


def test_rules_that_a_class_replaces_are_noted(tmp_path: Path) -> None:
    """The digits of this file go by threes, those of the class one by one."""
    backend = make_byte_tokenizer()
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    save_tokenizer(tmp_path, "qwen3", backend, tokenizer_class="Qwen2Tokenizer")

    notes = read(tmp_path).notes

    assert "transformers' Qwen2Tokenizer has its own normalizer and pre_tokenizer in place of" in notes[0]
    assert "tokenizer.json lacks '<|endoftext|>' (259): added by tokenizer_config.json or" in notes[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_that_are_obeyed_are_not_noted(tmp_path: Path, family: str) -> None:
    """Silence means that everything is as the files say."""
    assert read(save_tokenizer(tmp_path, family, make_byte_tokenizer())).notes == ()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_ids_that_are_read_otherwise_than_written_are_noted(tmp_path: Path, file: str) -> None:
    """Row Y9: the library numbers added tokens in a row, and other rows than were meant are taken."""
    save_tokenizer(tmp_path, "llama", make_byte_tokenizer())
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    gap = {**added[2], "content": "<gap>", "id": 270}
    changes: dict[str, dict[str, object]] = {
        "tokenizer.json": {"added_tokens": [*added, gap]},
        "tokenizer_config.json": {"added_tokens_decoder": {"270": gap}},
        "added_tokens.json": {"<gap>": 270},
    }
    edit_json(tmp_path / file, **changes[file])

    notes = read(tmp_path).notes

    assert f"{file} gives 270 as ids of added tokens that become '<gap>' (259)" in notes


def test_added_tokens_beyond_the_rows_are_noted(tmp_path: Path) -> None:
    """Row Y9: a trainer's own pad token may have no row; only prompts with it cannot be served."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens(["<a>", "<b>"])

    (note,) = read(save_tokenizer(tmp_path, "llama", tokenizer)).notes

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
    save_tokenizer(tmp_path, "llama", make_byte_tokenizer())
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    edit_json(tmp_path / "tokenizer.json", model={**model, **changes}, post_processor=None)

    with pytest.raises(ConfigError, match=said):
        read(tmp_path)


def test_token_around_every_text_needs_a_row(tmp_path: Path) -> None:
    """No text could be served."""
    with pytest.raises(ConfigError, match="puts token 256 around every text, the model has 256 rows"):
        read_tokenizer("/m", save_tokenizer(tmp_path, "llama", make_byte_tokenizer()), 256)


def test_rules_that_make_too_much_of_a_text_are_refused_before_loading(tmp_path: Path) -> None:
    """The library normalises added tokens as it loads them, with all memory if need be."""
    save_tokenizer(tmp_path, "llama", make_byte_tokenizer())
    doubling = {"type": "Replace", "pattern": {"String": "<"}, "content": "<<"}
    edit_json(tmp_path / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [doubling] * 40})

    with pytest.raises(ConfigError, match=r"normalizer and pre_tokenizer of tokenizer\.json may make a text"):
        read(tmp_path)
