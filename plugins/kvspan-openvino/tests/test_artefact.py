"""Tests of kvspan_openvino/artefact.py."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from kvspan_openvino import artefact
from kvspan_openvino.artefact import FACTS_FILE, MANIFEST_FILE, Facts, folder_name, kept, seal

from common.errors import ConfigError

RECIPE = {"checkpoint": "small 1a", "parts": "2"}
FACTS = Facts(hidden_size=72, num_layers=5, max_context=96, max_stretched=192)


class Maker:
    """Fills folders and counts how often."""

    def __init__(self, recipe: artefact.Recipe = RECIPE) -> None:
        self.num_made = 0
        self._recipe = recipe

    def __call__(self, folder: Path) -> None:
        """Make one."""
        self.num_made += 1
        for name in ("part-0.xml", "part-0.bin", MANIFEST_FILE):
            (folder / name).write_text(f"content of {name}")
        seal(folder, self._recipe, FACTS)


def test_a_model_is_made_once(tmp_path: Path) -> None:
    """The second time it is found under its recipe, with its facts."""
    make, cache = Maker(), tmp_path / "cache"

    first, second = kept(cache, RECIPE, make), kept(cache, RECIPE, make)

    assert first == second == (cache / folder_name(RECIPE), FACTS)
    assert make.num_made == 1
    assert cache.stat().st_mode & 0o077 == 0


def test_every_part_of_a_recipe_counts(tmp_path: Path) -> None:
    """Another checkpoint and another number of parts are kept beside it."""
    others = [{**RECIPE, "checkpoint": "small 1b"}, {**RECIPE, "parts": "3"}]

    folders = {kept(tmp_path, recipe, Maker(recipe))[0] for recipe in (RECIPE, *others)}

    assert len(folders) == 3


@pytest.mark.parametrize("name", ["part-0.xml", "part-0.bin", MANIFEST_FILE, FACTS_FILE])
@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_what_was_damaged_is_made_anew(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte in any file is enough; the log names folder and file."""
    make = Maker()
    folder, _ = kept(tmp_path, RECIPE, make)
    content = (folder / name).read_bytes()
    if damage == "missing":
        (folder / name).unlink()
    else:
        flipped = bytes([*content[:-2], content[-2] ^ 1, content[-1]])
        (folder / name).write_bytes(flipped if damage == "changed" else content[:-1])

    with caplog.at_level(logging.WARNING):
        again, facts = kept(tmp_path, RECIPE, make)

    assert (again, facts, make.num_made) == (folder, FACTS, 2)
    assert (folder / name).read_bytes() == content
    assert str(folder) in caplog.text
    assert name in caplog.text


def test_a_file_that_nobody_wrote_is_not_taken(tmp_path: Path) -> None:
    """What lies in the folder beside what was made says that somebody was at it."""
    make = Maker()
    folder, _ = kept(tmp_path, RECIPE, make)
    (folder / "part-1.xml").touch()

    kept(tmp_path, RECIPE, make)

    assert make.num_made == 2
    assert not (folder / "part-1.xml").exists()


def test_a_model_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    """A whole folder that was renamed is of the recipe that it says, not of its name."""
    other = {**RECIPE, "checkpoint": "small 1b"}
    kept(tmp_path, other, Maker(other))[0].rename(tmp_path / folder_name(RECIPE))
    make = Maker()

    folder, _ = kept(tmp_path, RECIPE, make)

    assert make.num_made == 1
    assert artefact.read(folder, RECIPE) == FACTS


@pytest.mark.parametrize("open_one", ["cache", "folder"])
def test_what_others_can_write_is_refused(tmp_path: Path, open_one: str) -> None:
    """They could put another model there after it was checked."""
    folder, _ = kept(tmp_path, RECIPE, Maker())
    place = tmp_path if open_one == "cache" else folder
    place.chmod(0o777)

    with pytest.raises(ConfigError, match="others can write into it") as refused:
        kept(tmp_path, RECIPE, Maker())

    assert str(place) in str(refused.value)


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Neither a folder that looks whole nor one that takes room."""

    def fail(folder: Path) -> None:
        (folder / "part-0.xml").write_text("half")
        raise ConfigError("model", "small", "is refused")

    with pytest.raises(ConfigError, match="is refused"):
        kept(tmp_path, RECIPE, fail)

    assert [path.name for path in tmp_path.iterdir()] == [".openvino-lock"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    """The next one that converts is alone and tidies up."""
    (tmp_path / ".openvino-dead" / "inner").mkdir(parents=True)

    kept(tmp_path, RECIPE, Maker())

    assert not (tmp_path / ".openvino-dead").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """It is a matter of configuration."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="cannot keep the converted model there"):
        kept(tmp_path / "file" / "cache", RECIPE, Maker())
