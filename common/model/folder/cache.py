"""Where kvspan keeps what it can make again, and the demo model in there once it was converted.

Not here: making the demo model, which needs the libraries of its format (`common/model/demo.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError

DEMO_NAME = "SmolLM2-135M-Instruct"

DEMO_FOLDER = f"{DEMO_NAME}-v1"
"""Raise the number whenever the conversion changes what it writes."""

_COMPLETE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where kvspan may keep what it can make again: $KVSPAN_CACHE, the XDG cache, or ~/.cache.

    Raises ConfigError when neither says where and this user has no home.
    """
    if own := environ.get("KVSPAN_CACHE"):
        return Path(own)
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "kvspan"
    try:
        return Path(environ.get("HOME") or "~").expanduser() / ".cache" / "kvspan"
    except RuntimeError as error:
        # A user without an entry in passwd, as containers have them.
        raise ConfigError("KVSPAN_CACHE", "", f"name a folder for converted models: {error}") from error


def demo_checkpoint(cache: Path) -> Path | None:
    """Return the converted demo model if it is in the cache."""
    folder = cache / DEMO_FOLDER
    return folder if is_complete(folder) else None


def is_complete(folder: Path) -> bool:
    """Tell whether a folder holds every file of the converted demo model."""
    return all((folder / name).is_file() for name in _COMPLETE_FILES)
