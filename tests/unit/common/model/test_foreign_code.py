"""Tests of `common/model/foreign_code.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model.foreign_code import code_notes

CODE = {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}


def test_code_beside_a_known_class_is_noted_and_not_followed(tmp_path: Path) -> None:
    """The library's class is what runs; whoever counts on the folder's own one should know."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CODE}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CODE))

    notes = code_notes("/m", tmp_path)

    assert [note.partition(" names")[0] for note in notes] == ["config.json", "tokenizer_config.json"]


@pytest.mark.parametrize("model_type", ["no-such", None, ["llama"]])
def test_model_that_is_nothing_but_code_is_refused(tmp_path: Path, model_type: object) -> None:
    """The sentence is ours: no flag here trusts code."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **CODE}))

    with pytest.raises(ConfigError, match=r"auto_map\), which is never run, and transformers has no"):
        code_notes("/m", tmp_path)


def test_folder_without_code_has_no_notes(tmp_path: Path) -> None:
    """A type that transformers does not know is refused in the same words."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert code_notes("/m", tmp_path) == ()

    (tmp_path / "config.json").write_text('{"model_type": "no-such"}')
    with pytest.raises(ConfigError, match="/m: transformers has no model_type 'no-such' of its own"):
        code_notes("/m", tmp_path)
