"""Where the chat template of a folder stands, and which one is used when there are several.

Theory of operation: transformers takes the files over tokenizer_config.json, and looks no further; the choice
is the same here, and whatever else says something different is named. chat_template.json it reads for
processors only; many folders have no other, so that is used where there is none.

Not here: what a template makes of a chat (`common/model/text/chat_template.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.excerpt import excerpt
from common.model.folder.files import TOKENIZER_CONFIG, read_object

LEGACY = "chat_template.json"

_EXTRA, _JINJA = "additional_chat_templates", "chat_template.jinja"


def default_template(value: Any) -> str | None:
    """Return the template for chats without tools; None also when none of several is that."""
    return value.get("default") if isinstance(value, dict) else value


def find_templates(spec: str, folder: Path) -> dict[str, Any]:
    """Return what stands in each place of a chat template, a text or texts by name; what wins stands first.

    Raises: `ConfigError` when a place has no text, or cannot be read.
    """
    extra = {Path(name).stem for name in _listed(spec, folder / _EXTRA) if name.endswith(".jinja")}
    places: dict[str, Any] = {}
    for name in sorted(extra, key=lambda name: (name != "default", name)):
        place = f"{_EXTRA}/{name}.jinja"
        places[place] = {name: _read(spec, folder / place)}
    if (folder / _JINJA).is_file():
        places[_JINJA] = _read(spec, folder / _JINJA)
    for name in (TOKENIZER_CONFIG, LEGACY):
        value = read_object(spec, folder / name).get("chat_template")
        if isinstance(value, list):
            value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        if value is not None:
            places[name] = value
    for name, value in places.items():
        if not all(isinstance(one, str) for one in (value.values() if isinstance(value, dict) else [value])):
            raise ConfigError("model", spec, f"the chat template of {name} is no text")
    return places


def template_notes(places: dict[str, Any], loaded: Any) -> Iterator[str]:
    """Yield what people should know about the template that is used, given what transformers loaded."""
    used = places.get(LEGACY) if loaded is None else loaded
    if loaded is None and used is not None:
        yield f"the chat template is that of {LEGACY}, which transformers reads for processors only"
    if isinstance(used, dict) and "default" not in used:
        names = excerpt(", ".join(sorted(map(str, used))))
        yield f"of the chat templates {names} none is called default: chats are refused"
    wanted = default_template(used)
    defaults = {name: default_template(value) for name, value in places.items()}
    winner = next((name for name, text in defaults.items() if text == wanted), None)
    for name, text in defaults.items():
        if winner is not None and text not in (None, wanted):
            yield f"{name} has another chat template than {winner}, which hides it"


def _listed(spec: str, folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError("model", spec, f"cannot read {folder.name}: {error.strerror}") from error


def _read(spec: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ConfigError("model", spec, f"{path.name} is no text: {error}") from error
