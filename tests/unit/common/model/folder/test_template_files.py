"""Tests of `common/model/folder/template_files.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.model.folder.template_files import default_template
from common.model.text.tokenizer_files import FolderTokenizer, read_tokenizer
from common.model.tiny import VOCAB_SIZE, make_byte_tokenizer
from tests.support.vocabularies import edit_json, save_tokenizer

JINJA, CONFIG, LEGACY, EXTRA = (
    "chat_template.jinja", "tokenizer_config.json", "chat_template.json",
    "additional_chat_templates/default.jinja",
)  # fmt: skip

RAG = "additional_chat_templates/rag.jinja"

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
        ["tokenizer_config.json has another chat template than chat_template.jinja, which hides it"],
    ),
    "the config and the older file": (
        {CONFIG: "C", LEGACY: "L"},
        "C",
        ["chat_template.json has another chat template than tokenizer_config.json, which hides it"],
    ),
    "a folder and a file": (
        {EXTRA: "E", JINJA: "J"},
        "E",
        [f"chat_template.jinja has another chat template than {EXTRA}, which hides it"],
    ),
    "names without a default": (
        {CONFIG: [{"name": "rag", "template": "R"}]},
        None,
        ["of the chat templates rag none is called default: chats are refused"],
    ),
    "a name without a default hides the config": (
        {RAG: "R", CONFIG: "C"},
        None,
        [
            "of the chat templates rag none is called default: chats are refused",
            f"tokenizer_config.json has another chat template than {RAG}, which hides it",
        ],
    ),
    "none": ({}, None, []),
}


@pytest.mark.parametrize("case", PLACES)
def test_chat_template_is_found_in_each_of_its_places(folder: Path, case: str) -> None:
    """Row Y4: of two transformers' choice is used and the other one is named."""
    places, used, notes = PLACES[case]
    put(folder, places)

    found = read(folder)

    assert default_template(found.pretrained.chat_template) == used
    assert list(found.notes) == notes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer without a template."""
    save_tokenizer(tmp_path, "llama", make_byte_tokenizer())
    (tmp_path / JINJA).unlink()
    return tmp_path


def read(folder: Path) -> FolderTokenizer:
    """Return what a service reads of a folder."""
    return read_tokenizer("/m", folder, VOCAB_SIZE)


def put(folder: Path, places: dict[str, Any]) -> None:
    """Write templates where they belong."""
    for place, template in places.items():
        if place.endswith(".json"):
            edit_json(folder / place, chat_template=template)
        else:
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(template)


@pytest.mark.parametrize("value", [5, {"default": 5}, [{"name": "default"}]])
@pytest.mark.parametrize("place", [CONFIG, LEGACY])
def test_chat_template_that_is_no_text_is_refused(folder: Path, place: str, value: object) -> None:
    """Else the first chat would find it."""
    put(folder, {place: value})

    with pytest.raises(ConfigError, match=rf"the chat template of {place} is no text"):
        read(folder)


@pytest.mark.parametrize("place", [JINJA, EXTRA, RAG])
def test_file_that_is_no_text_is_refused_by_name(folder: Path, place: str) -> None:
    """A library blames the tokenizer for it."""
    put(folder, {place: "J"})
    (folder / place).write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match=rf"{Path(place).name} is no text"):
        read(folder)
