"""A folder that no model can be loaded from is refused by its files, with the file and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model.folder.files import check_complete, check_readable

ROOT = Path(__file__).parents[4]
SPEC = "given"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 7\n"
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that look like a checkpoint; nothing in them is looked at here."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    return tmp_path


def refusal(folder: Path) -> str:
    """Return why a folder is refused."""
    with pytest.raises(ConfigError) as caught:
        check_readable(SPEC, folder)
        check_complete(SPEC, folder)
    assert (caught.value.field, caught.value.value) == ("model", SPEC)
    return caught.value.problem


def test_whole_folder_is_accepted(folder: Path) -> None:
    """Nothing is looked at but whether it can be read."""
    check_readable(SPEC, folder)
    check_complete(SPEC, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pointer_of_git_lfs_is_named_with_the_way_out(folder: Path, name: str) -> None:
    """Row Y7: a clone without git-lfs has small texts in place of its large files."""
    (folder / name).write_bytes(POINTER)

    assert refusal(folder).startswith(f"{name} is a git-lfs pointer")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "the folder has no config.json"),
        ("tokenizer.json", "the folder has no tokenizer.json; save one there"),
    ],
)
def test_missing_file_is_named(folder: Path, name: str, said: str) -> None:
    """Row Y12: a library would make a tokenizer up, or ask for packages that help nothing."""
    (folder / name).unlink()

    assert refusal(folder).startswith(said)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "vocab.json"])
def test_other_files_of_a_tokenizer_are_none(folder: Path, name: str) -> None:
    """Row Y12: transformers would make an empty one up, and every text would have the same ids."""
    (folder / "tokenizer.json").rename(folder / name)

    assert refusal(folder).startswith("the folder has no tokenizer.json")


def _link(path: Path) -> None:
    path.symlink_to("../blobs/7")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("make", "said"),
    [(_link, "is a link to ../blobs/7, not there"), (os.mkfifo, "is no file"), (Path.mkdir, "is no file")],
)
def test_what_is_no_file_is_named_at_once(
    folder: Path, make: Callable[[Path], None], said: str, name: str
) -> None:
    """A cut link is not "missing", and nobody waits for a writer of a FIFO."""
    (folder / name).unlink()
    make(folder / name)

    assert refusal(folder) == f"{name} {said}"


@pytest.mark.parametrize(
    ("name", "said"),
    [("adapter_config.json", "; it holds an adapter"), ("m-Q4.gguf", "; a GGUF file is not read"), ("a", "")],
)
def test_folder_without_a_config_is_told_what_it_is(tmp_path: Path, name: str, said: str) -> None:
    """Row Y8: an adapter alone, or a file of another format, is no model."""
    (tmp_path / name).touch()

    assert refusal(tmp_path).startswith(f"the folder has no config.json{said}")


def test_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """A typing error, or a file, is no folder."""
    (tmp_path / "file").touch()

    assert refusal(tmp_path / "absent") == "no such folder; models are never downloaded"
    assert refusal(tmp_path / "file") == "is a file; give the folder that it lies in"


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(("name", "mode"), [("model.safetensors", 0), (".", 0), (".", 0o644)])
def test_what_another_user_may_not_read_is_named_with_its_mode(
    public_folder: Path, name: str, mode: int
) -> None:
    """A mode of 0600 reads as "no such file" in a library, which sends people to look for it."""
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (public_folder / file).write_bytes(b"{}")
    (public_folder / name).chmod(mode)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from common.model.folder.files import check_readable\n"
        f"if os.geteuid() == 0: os.setuid({NOBODY})\n"
        f"check_readable('given', Path({str(public_folder)!r}))"
    )

    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    public_folder.chmod(0o755)

    owner = os.geteuid()
    asker = NOBODY if owner == 0 else owner
    said = f"Permission denied (mode {mode:04o} of user {owner}, this process is user {asker})"
    what = "model.safetensors" if name != "." else "the folder"
    assert f"model=given: cannot read {what}: {said}" in done.stderr
