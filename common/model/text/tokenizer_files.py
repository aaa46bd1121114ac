"""Reads the tokenizer of a folder as transformers does, and names what of its files is not obeyed by that.

Theory of operation: token ids are those of `AutoTokenizer`, which the author of a model tried it with. Some
classes build their rules (how digits are split, what is normalised) themselves and take only the vocabulary
from tokenizer.json, and added tokens get ids without gaps; that is done in the same way, and said at start. A
vocabulary that the model has no rows for is refused.

Not here: chat templates (`common/model/folder/template_files.py`), what text becomes (`tokenizer.py`), end
tokens (`common/model/generation.py`), which files must exist (`common/model/folder/files.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.errors import ConfigError
from common.excerpt import excerpt
from common.model.folder.files import ADDED_TOKENS, TOKENIZER, TOKENIZER_CONFIG, read_object
from common.model.folder.template_files import LEGACY, find_templates, template_notes
from common.model.text.growth import MAX_GROWTH, growth

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
    templates = find_templates(spec, folder)
    _check_growth(spec, folder)
    pretrained = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(pretrained, FastTokenizer):
        raise ConfigError("model", spec, f"{type(pretrained).__name__} has no {TOKENIZER} form")
    backend = pretrained.backend_tokenizer
    _check_rows(spec, backend, num_rows)
    vocab = backend.get_vocab()
    notes = [
        *_rule_notes(pretrained, Backend.from_file(str(folder / TOKENIZER)), vocab),
        *_moved_notes(spec, folder, vocab),
        *_row_notes(vocab, num_rows),
        *template_notes(templates, pretrained.chat_template),
    ]
    if pretrained.chat_template is None:
        pretrained.chat_template = templates.get(LEGACY)
    return FolderTokenizer(pretrained, tuple(notes))


def _check_growth(spec: str, folder: Path) -> None:
    """Raise `ConfigError` when the rules of a file would make so much of a text that loading is a danger."""
    written = read_object(spec, folder / TOKENIZER)
    factor = prod(growth(written.get(name)) for name in _RULES)
    if factor > MAX_GROWTH:
        problem = f"may make a text {factor:.3g} times as long, the limit is {MAX_GROWTH}"
        raise ConfigError("model", spec, f"the {' and '.join(_RULES)} of {TOKENIZER} {problem}")


def _rule_notes(pretrained: FastTokenizer, written: Backend, new: dict[str, int]) -> Iterator[str]:
    """Yield what the class does otherwise than tokenizer.json says; `new` are its ids."""
    backend = pretrained.backend_tokenizer
    other = [name for name in _RULES if _state(getattr(backend, name)) != _state(getattr(written, name))]
    ours, theirs = backend.model, written.model
    if type(ours) is not type(theirs) or any(_flag(ours, name) != _flag(theirs, name) for name in _FLAGS):
        other.append("model")
    old = written.get_vocab()
    if any(new.get(token) != token_id for token, token_id in old.items()):
        other.append("ids")
    name = type(pretrained).__name__
    if other:
        parts = " and ".join(other)
        yield f"transformers' {name} has its own {parts} in place of those of {TOKENIZER}"
    if added := sorted(new.keys() - old.keys(), key=new.__getitem__):
        yield f"{TOKENIZER} lacks {_shown(added, new)}: added by {TOKENIZER_CONFIG} or transformers' {name}"


def _written_ids(spec: str, folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each file that gives ids to added tokens, with them."""
    added = read_object(spec, folder / TOKENIZER)["added_tokens"]
    yield TOKENIZER, {one["content"]: one["id"] for one in added}
    decoder = read_object(spec, folder / TOKENIZER_CONFIG).get("added_tokens_decoder", {})
    yield TOKENIZER_CONFIG, {one["content"]: int(token_id) for token_id, one in decoder.items()}
    yield ADDED_TOKENS, read_object(spec, folder / ADDED_TOKENS)


def _moved_notes(spec: str, folder: Path, vocab: dict[str, int]) -> Iterator[str]:
    """Yield which added tokens got other ids than a file gives them: the library leaves no gap."""
    for file, ids in _written_ids(spec, folder):
        if moved := [token for token in ids if token in vocab and vocab[token] != ids[token]]:
            written = excerpt(", ".join(str(ids[token]) for token in moved), 60)
            yield f"{file} gives {written} as ids of added tokens that become {_shown(moved, vocab)}"


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


def _row_notes(vocab: dict[str, int], num_rows: int) -> Iterator[str]:
    """Yield which of the tokens that were added the model has no row for."""
    if beyond := sorted((token for token in vocab if vocab[token] >= num_rows), key=vocab.__getitem__):
        shown = _shown(beyond, vocab)
        yield f"the model has {num_rows} rows, none for {shown}: prompts with them are refused"


def _shown(tokens: list[str], ids: dict[str, int]) -> str:
    shown = ", ".join(f"{excerpt(token, 40)!r} ({ids[token]})" for token in tokens[:_SHOWN_TOKENS])
    return shown + (f" and {len(tokens) - _SHOWN_TOKENS} more" if len(tokens) > _SHOWN_TOKENS else "")
