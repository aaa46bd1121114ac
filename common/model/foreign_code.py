"""A folder may name Python of its own (`auto_map`); none of it is ever run.

Theory of operation: transformers takes its own class of the same type instead, where it has one. Where it has
none, a library's error would tell people to trust the code, which no flag here does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import CONFIG_MAPPING

from common.errors import ConfigError
from common.excerpt import excerpt
from common.model.folder.files import CONFIG, TOKENIZER_CONFIG, read_object

_KEY = "auto_map"


def code_notes(spec: str, folder: Path) -> tuple[str, ...]:
    """Return what people should know about code that a folder names.

    Raises: `ConfigError` when the model cannot be read without it.
    """
    config = read_object(spec, folder / CONFIG)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        needs = f"{CONFIG} names code of the folder ({_KEY}), which is never run, and "
        kind = excerpt(repr(model_type))
        problem = f"{needs if _KEY in config else ''}transformers has no model_type {kind} of its own"
        raise ConfigError("model", spec, problem)
    return tuple(_notes(_KEY in config, _KEY in read_object(spec, folder / TOKENIZER_CONFIG)))


def _notes(has_model_code: bool, has_tokenizer_code: bool) -> Iterator[str]:
    for file, has_code in ((CONFIG, has_model_code), (TOKENIZER_CONFIG, has_tokenizer_code)):
        if has_code:
            yield f"{file} names code of the folder ({_KEY}): it is not run, transformers has a class for it"
