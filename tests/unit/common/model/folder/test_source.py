"""Tests of common/model/folder/source.py."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model.folder.source import SourceKind, TinyFamily, parse_source


def test_reserved_words_need_no_folder() -> None:
    """`demo` and `tiny:<family>` name models without any path."""
    demo, tiny = parse_source("demo"), parse_source("tiny:gemma3")

    assert (demo.kind, demo.folder, demo.family) == (SourceKind.DEMO, None, None)
    assert (tiny.kind, tiny.folder, tiny.family) == (SourceKind.TINY, None, TinyFamily.GEMMA3)
    assert tiny.name == "tiny:gemma3"


def test_folder_is_resolved_when_it_holds_a_config(tmp_path: Path) -> None:
    """A folder with a config.json is a source, named after the folder itself."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    source = parse_source(str(tmp_path / "other" / ".." / "my-model"))

    assert (source.kind, source.folder, source.name) == (SourceKind.FOLDER, folder.resolve(), "my-model")


@pytest.mark.parametrize("spec", ["", "tiny:", "tiny:gpt9", "tiny", "owner/model", "/no/such/folder"])
def test_unknown_spec_is_refused_by_the_field_model(spec: str) -> None:
    """What is neither a reserved word nor a local folder is a configuration error, never a download."""
    with pytest.raises(ConfigError) as refusal:
        parse_source(spec)

    assert refusal.value.field == "model"
    assert refusal.value.value == spec


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    """A folder that holds no config.json is no checkpoint, and the message says what is missing."""
    with pytest.raises(ConfigError, match=r"no config\.json"):
        parse_source(str(tmp_path))
