"""Which checkpoint a spec stands for, told from its files alone, so that a converted model is found again.

Theory of operation: a folder is its files, digested; neither their place nor their times count. A tiny model
has none, so it is loaded, and its weights tell.

Not here: what is loaded (`common/model/loader.py`), what is kept (`artefact.py`).
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from common.errors import ConfigError
from common.model.folder.cache import demo_checkpoint
from common.model.folder.source import SourceKind, parse_source
from kvspan_openvino.artefact import file_digest

_READ = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
"""Files that decide weights, configuration or tokenizer of a folder."""


def checkpoint_of(spec: str, cache: Path, progress: bool) -> str:
    """Return a text that differs for every other checkpoint.

    Raises: `ConfigError` for a spec that stands for none, or a file that cannot be read.
    """
    source = parse_source(spec)
    if source.kind is SourceKind.TINY:
        from common.model.loader import load_model

        found = load_model(spec, "float32", progress).fingerprint
        return f"{spec} {found.config} {found.weights} {found.tokenizer}"
    folder = source.folder or demo_checkpoint(cache) or _converted_demo(cache, progress)
    try:
        return f"{source.name} {folder_digest(folder)}"
    except OSError as error:
        raise ConfigError("model", spec, f"cannot be read: {error.strerror}: {error.filename}") from error


def folder_digest(folder: Path) -> str:
    """Return the digest of the files of a checkpoint, their names included. Raises: `OSError`."""
    digest = xxhash.xxh3_128()
    for path in sorted({path for pattern in _READ for path in folder.glob(pattern) if path.is_file()}):
        digest.update(f"{path.relative_to(folder)}|{file_digest(path)}|".encode())
    return digest.hexdigest()


def _converted_demo(cache: Path, progress: bool) -> Path:
    from common.model.demo import ensure_demo_checkpoint

    return ensure_demo_checkpoint(cache, progress)
