"""Reads the tokenizer of a folder as transformers does, and names what of its files is not obeyed by that.

Theory of operation: token ids are those of `AutoTokenizer`, which the author of a model tried it with. Some
classes build their rules (how digits are split, what is normalised) themselves and take only the vocabulary
from tokenizer.json; a chat template can stand in several places, of which one wins. Both are obeyed as
transformers does, and said at start. A vocabulary that the model has no rows for is refused.

Not here: what text becomes (`text.py`), end tokens (`generation.py`), which files must exist (`folder.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.errors import ConfigError
from common.excerpt import excerpt
from common.model.folder import TOKENIZER, TOKENIZER_CONFIG, read_object

EXTRA_TEMPLATES = "additional_chat_templates"

_JINJA, _LEGACY = "chat_template.jinja", "chat_template.json"

_RULES = ("normalizer", "pre_tokenizer")
"""Parts of a tokenizer.json that decide which ids a text has, beside its vocabulary."""

_FLAGS = (
    "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "ignore_merges",
    "unk_token",
)  # fmt: skip
"""The same within its model."""

_SHOWN_TOKENS = 5


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """A tokenizer and what people should know about it."""

    pretrained: FastTokenizer
    notes: tuple[str, ...]


def read_tokenizer(spec: str, folder: Path, num_rows: int) -> FolderTokenizer:
    """Return the tokenizer of a folder, for a model of so many rows.

    Raises: `ConfigError` when it cannot serve that model; whatever a library raises over broken files.
    """
    pretrained = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(pretrained, FastTokenizer):
        raise ConfigError("model", spec, f"{type(pretrained).__name__} has no {TOKENIZER} form")
    _check_rows(spec, pretrained.backend_tokenizer, num_rows)
    places = _templates(spec, folder)
    template_notes = (*_template_notes(places, pretrained.chat_template),)
    if pretrained.chat_template is None:
        pretrained.chat_template = places.get(_LEGACY)
    written = Backend.from_file(str(folder / TOKENIZER))
    notes = (*_rule_notes(pretrained, written), *_row_notes(pretrained.backend_tokenizer, num_rows))
    return FolderTokenizer(pretrained, (*notes, *template_notes))


def default_template(value: Any) -> str | None:
    """Return the template for chats without tools; None also when none of several is that."""
    return value.get("default") if isinstance(value, dict) else value


def _rule_notes(pretrained: FastTokenizer, written: Backend) -> Iterator[str]:
    """Yield what the class does otherwise than tokenizer.json says."""
    backend = pretrained.backend_tokenizer
    other = [name for name in _RULES if _state(getattr(backend, name)) != _state(getattr(written, name))]
    ours, theirs = backend.model, written.model
    if type(ours) is not type(theirs) or any(_flag(ours, name) != _flag(theirs, name) for name in _FLAGS):
        other.append("model")
    old, new = written.get_vocab(), backend.get_vocab()
    if any(new.get(token) != token_id for token, token_id in old.items()):
        other.append("ids")
    name = type(pretrained).__name__
    if other:
        parts = " and ".join(other)
        yield f"transformers' {name} has its own {parts} in place of those of {TOKENIZER}"
    if added := sorted(new.keys() - old.keys(), key=new.__getitem__):
        yield f"{TOKENIZER} lacks {_shown(added, new)}: added by {TOKENIZER_CONFIG} or transformers' {name}"


def _state(part: Any) -> Any:
    """Return the rules of a part; None and an empty sequence of parts do nothing."""
    state = _without_offsets(json.loads(part.__getstate__())) if part is not None else None
    return None if state in ({"type": "Sequence", "normalizers": []}, None) else state


def _without_offsets(state: Any) -> Any:
    """Drop what moves positions in the text and changes no id."""
    if isinstance(state, dict):
        return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}
    return [_without_offsets(one) for one in state] if isinstance(state, list) else state


def _flag(model: Any, name: str) -> Any:
    return getattr(model, name, None) or None


def _check_rows(spec: str, backend: Backend, num_rows: int) -> None:
    """Raise `ConfigError` when ordinary text has ids that the model has no row for, or random ids."""
    highest = max(backend.get_vocab(with_added_tokens=False).values(), default=None)
    around = max(backend.encode("").ids, default=0)
    rows = f"the model has {num_rows} rows"
    if highest is None:
        problem = "has no tokens"
    elif highest >= num_rows:
        problem = f"has token ids up to {highest}, {rows}: it is another model's"
    elif around >= num_rows:
        problem = f"puts token {around} around every text, {rows}"
    elif dropout := getattr(backend.model, "dropout", None):
        problem = f"has dropout {dropout}, which makes ids random"
    else:
        return
    raise ConfigError("model", spec, f"{TOKENIZER} {problem}")


def _row_notes(backend: Backend, num_rows: int) -> Iterator[str]:
    """Yield which of the tokens that were added the model has no row for."""
    vocab = backend.get_vocab()
    if beyond := sorted((token for token in vocab if vocab[token] >= num_rows), key=vocab.__getitem__):
        shown = _shown(beyond, vocab)
        yield f"the model has {num_rows} rows, none for {shown}: prompts with them are refused"


def _shown(tokens: list[str], ids: dict[str, int]) -> str:
    shown = ", ".join(f"{excerpt(token, 40)!r} ({ids[token]})" for token in tokens[:_SHOWN_TOKENS])
    return shown + (f" and {len(tokens) - _SHOWN_TOKENS} more" if len(tokens) > _SHOWN_TOKENS else "")


def _templates(spec: str, folder: Path) -> dict[str, Any]:
    """Return what stands in each place of a chat template, the place that wins first."""
    places: dict[str, Any] = {}
    for name in (f"{EXTRA_TEMPLATES}/default.jinja", _JINJA):
        if (folder / name).is_file():
            places[name] = (folder / name).read_text(encoding="utf-8")
    for name in (TOKENIZER_CONFIG, _LEGACY):
        value = read_object(spec, folder / name).get("chat_template")
        if isinstance(value, list):
            value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        if value is not None:
            places[name] = value
    for name, value in places.items():
        if not all(isinstance(one, str) for one in (value.values() if isinstance(value, dict) else [value])):
            raise ConfigError("model", spec, f"the chat template of {name} is no text")
    return places


def _template_notes(places: dict[str, Any], loaded: Any) -> Iterator[str]:
    """Yield what people should know about the template that is used, given what transformers loaded."""
    used = places.get(_LEGACY) if loaded is None else loaded
    if loaded is None and used is not None:
        yield f"the chat template is that of {_LEGACY}, which transformers reads for processors only"
    if isinstance(used, dict) and "default" not in used:
        names = excerpt(", ".join(sorted(map(str, used))))
        yield f"of the chat templates {names} none is called default: chats are refused"
    defaults = {name: default_template(value) for name, value in places.items()}
    winner = next((name for name, text in defaults.items() if text == default_template(used)), None)
    for name, text in defaults.items():
        if winner is not None and text not in (None, defaults[winner]):
            yield f"{name} has another chat template than {winner}, which is used"
