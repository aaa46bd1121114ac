"""Whether a checkpoint folder holds what a model is loaded from, told from its files alone.

Theory of operation: libraries report a file that they may not open as missing, one that git-lfs left behind
as broken, and a tokenizer that is not there as a package that is not installed; some make up what they lack.
So every file that loading reads is opened first, and what must be there is looked for by name. No library and
no weight is loaded for it.

Not here: what the files mean (`common/model/loader.py`, `common/model/describe.py`).
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.excerpt import excerpt

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED_TOKENS = "added_tokens.json"

_READ = (
    CONFIG, "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*.jinja",
    "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
"""What loading reads of a folder, as far as it is there."""

_OBJECTS = ("generation_config.json", TOKENIZER_CONFIG, "special_tokens_map.json", ADDED_TOKENS)
"""Small files of JSON objects; a library takes some that are none for absent."""

_POINTER = b"version https://git-lfs.github.com/spec/"


def check_readable(spec: str, folder: Path) -> None:
    """Raise `ConfigError` unless `folder` is a checkpoint whose files can be read; it was given as `spec`."""
    try:
        if folder.is_file():
            raise ConfigError("model", spec, "is a file; give the folder that it lies in")
        if not folder.is_dir():
            raise ConfigError("model", spec, "no such folder; models are never downloaded")
        # A link that leads nowhere is there, too: a pattern finds it, a plain name would not.
        names = {path for pattern in _READ for path in folder.glob(pattern)}
        names |= {folder / name for name in _READ if (folder / name).is_symlink()}
        if not os.access(folder, os.X_OK) or not (names or os.access(folder, os.R_OK)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise ConfigError("model", spec, f"cannot read the folder: {_reason(error, folder)}") from error
    for path in sorted(names):
        check_file(spec, path)
    if folder / CONFIG not in names:
        raise ConfigError("model", spec, f"the folder has no {CONFIG}{_instead(folder)}")


def _instead(folder: Path) -> str:
    """Return what a folder without a config is, where that can be told."""
    if (folder / "adapter_config.json").exists():
        return "; it holds an adapter (adapter_config.json), to be merged into its base model first"
    if any(folder.glob("*.gguf")):
        return "; a GGUF file is not read: save the model as safetensors"
    return ""


def check_complete(spec: str, folder: Path) -> None:
    """Raise `ConfigError` unless the tokenizer is there, and every small file is what it should be."""
    for name in _OBJECTS:
        read_object(spec, folder / name)
    if not (folder / TOKENIZER).exists():
        way_out = "save one there with save_pretrained of transformers' tokenizer"
        raise ConfigError("model", spec, f"the folder has no {TOKENIZER}; {way_out}")


def read_object(spec: str, path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, an empty one where there is no file.

    Raises: `ConfigError` when the file holds anything else.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigError("model", spec, f"{path.name} is no JSON: {excerpt(str(error))}") from error
    if not isinstance(content, dict):
        raise ConfigError("model", spec, f"{path.name} is no JSON object: {excerpt(json.dumps(content))}")
    return content


def check_file(spec: str, path: Path) -> None:
    """Raise `ConfigError` unless `path` is a file that can be read, and none that stands for another one."""
    try:
        # Not blocking: a FIFO would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ConfigError("model", spec, f"{path.name} is a link to {path.readlink()}, not there") from error
    except OSError as error:
        raise ConfigError("model", spec, f"cannot read {path.name}: {_reason(error, path)}") from error
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        head = os.read(descriptor, len(_POINTER)) if is_file else b""
    finally:
        os.close(descriptor)
    if not is_file:
        raise ConfigError("model", spec, f"{path.name} is no file")
    if head == _POINTER:
        problem = f"{path.name} is a git-lfs pointer, not the file itself; run git lfs pull in that folder"
        raise ConfigError("model", spec, problem)


def _reason(error: OSError, path: Path) -> str:
    """Return what the kernel says; of what may not be read also whose it is and who asks."""
    text = error.strerror or str(error)
    try:
        status = path.lstat()
    except OSError:
        return text
    if not isinstance(error, PermissionError):
        return text
    owner = f"mode {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}"
    return f"{text} ({owner}, this process is user {os.geteuid()})"
