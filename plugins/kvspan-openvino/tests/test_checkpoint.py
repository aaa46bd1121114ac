"""Tests of kvspan_openvino/checkpoint.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kvspan_openvino.checkpoint import checkpoint_of, folder_digest

from common.errors import ConfigError


def make_folder(place: Path) -> Path:
    """Return a folder with the files of a checkpoint."""
    (place / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/a.jinja"):
        (place / name).write_text(f"content of {name}")
    return place


def test_place_and_other_files_do_not_count(tmp_path: Path) -> None:
    """A copy beside notes of its owner is the same checkpoint."""
    first = make_folder(tmp_path / "first")
    second = shutil.copytree(first, tmp_path / "second")
    (second / "README.md").write_text("notes")

    assert folder_digest(first) == folder_digest(second)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "additional_chat_templates/a.jinja"])
def test_every_byte_counts(tmp_path: Path, name: str) -> None:
    """A file of the same size and time with another byte is another checkpoint."""
    folder = make_folder(tmp_path / "model")
    before = folder_digest(folder)
    (folder / name).write_text((folder / name).read_text().replace("o", "0", 1))

    assert folder_digest(folder) != before


def test_a_name_counts(tmp_path: Path) -> None:
    """Two files that swapped their names are read otherwise."""
    folder = make_folder(tmp_path / "model")
    before = folder_digest(folder)
    (folder / "config.json").rename(folder / "other.json")

    assert folder_digest(folder) != before


def test_tiny_models_differ(tmp_path: Path) -> None:
    """They have no files; their weights tell."""
    found = {checkpoint_of(f"tiny:{family}", tmp_path, False) for family in ("llama", "qwen3")}

    assert len(found) == 2


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """As every service refuses it."""
    with pytest.raises(ConfigError, match="no such folder"):
        checkpoint_of(str(tmp_path / "absent"), tmp_path, False)
