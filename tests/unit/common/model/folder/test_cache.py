"""Tests of common/model/folder/cache.py."""

from pathlib import Path

from common.model.folder.cache import DEMO_FOLDER, cache_folder, demo_checkpoint


def test_cache_is_the_first_one_that_is_set() -> None:
    """$KVSPAN_CACHE is taken as it is, the others get a folder of their own."""
    homes = {"XDG_CACHE_HOME": "/xdg", "HOME": "/home/ann"}

    assert cache_folder({"KVSPAN_CACHE": "/own", **homes}) == Path("/own")
    assert cache_folder(homes) == Path("/xdg/kvspan")
    assert cache_folder({"HOME": "/home/ann"}) == Path("/home/ann/.cache/kvspan")


def test_checkpoint_with_a_missing_file_does_not_count(tmp_path: Path) -> None:
    """A folder without its weights is not the demo model."""
    folder = tmp_path / DEMO_FOLDER
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("x")
    is_whole = demo_checkpoint(tmp_path) == folder
    (folder / "model.safetensors").unlink()

    assert is_whole
    assert demo_checkpoint(tmp_path) is None
