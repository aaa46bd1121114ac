"""How long a text may be that can still fit into so many tokens, known before it is tokenized.

Theory of operation: tokenizing a million characters takes about a second, and a text that is far too long
need not be tokenized to be refused. A token of the vocabulary stands for at most as many characters as its
own text has, times the characters of which the normaliser, step by step, makes one:

    text, less `uncounted`  <=  tokens x chars_per_token

`uncounted` are characters of which any number may vanish without a token. The bound holds for any text, so
what fits is never refused by it; where a tokenizer may make one token, or none, of a text of any length,
there is no bound.

Not here: the tokens (`text.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

Config = Mapping[str, Any]
"""A tokenizer.json, or a part of it."""

_COMPOSED_CHARS = 4
"""Most characters of which NFC makes one."""

_SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())
"""What an added token may swallow beside it."""

_LAST_BYTES = range(0x80, 0xC0)
"""Last bytes of all characters that are not ASCII, and the code points of some that have each of them."""


@dataclass(frozen=True, slots=True)
class TextBound:
    """What is known of a tokenizer."""

    chars_per_token: int
    """No token stands for more characters."""

    uncounted: str
    """Characters that may be of no token."""

    def count(self, text: str) -> int:
        """Return the characters of a text that need tokens."""
        return len(text) - sum(map(text.count, self.uncounted))


def text_bound(config: Config) -> TextBound | None:
    """Return the bound of a tokenizer; None when a text of any length may be a few tokens."""
    normalizers = tuple(_steps(config["normalizer"], "normalizers"))
    splitters = tuple(_steps(config["pre_tokenizer"], "pretokenizers"))
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    vocabulary, added = _vocabulary(config["model"]), config["added_tokens"]
    shrinks = [_shrink(step) for step in normalizers]
    lost = _lost(config["model"], vocabulary, is_byte_level=is_byte_level)
    if config["truncation"] or lost is None or None in shrinks or not all(map(_keeps_all, splitters)):
        return None
    swallowed = _SPACES if any(token["lstrip"] or token["rstrip"] for token in added) else ""
    if any(char in step.get("content", "") for step in normalizers for char in lost + swallowed):
        return None
    longest = max(map(len, (*vocabulary, *(token["content"] for token in added))))
    return TextBound(longest * prod(filter(None, shrinks)), lost + swallowed)


def _steps(part: Config | None, name: str) -> Iterator[Config]:
    """Yield the steps of a normaliser or a pre-tokenizer."""
    if part is not None and part["type"] == "Sequence":
        for step in part[name]:
            yield from _steps(step, name)
    elif part is not None:
        yield part


def _shrink(step: Config) -> int | None:
    """Return the most characters of which a step of the normaliser makes one; None when there is no most."""
    match step:
        case {"type": "NFC" | "NFKC"}:
            return _COMPOSED_CHARS
        case {"type": "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
            return -(-len(old) // len(new))
    return None


def _keeps_all(step: Config) -> bool:
    """Tell whether a step of the pre-tokenizer drops nothing."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")


def _vocabulary(model: Config) -> frozenset[str]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return frozenset(piece for piece, _ in vocabulary)
    return frozenset(vocabulary)


def _lost(model: Config, vocabulary: frozenset[str], *, is_byte_level: bool) -> str | None:
    """Return the characters that may be of no token; None when any may be, or a run of any is one token.

    With all bytes in the vocabulary none is lost. Where some are missing, a character that is not ASCII must
    keep its last byte, and only control characters may be lost, which no normaliser makes of others.
    """
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return ""
    if model["type"] != "BPE" or not is_byte_level:
        return None
    lost = "".join(char for char in map(chr, range(0x80)) if _last_symbol(char) not in vocabulary)
    is_control = all(char < " " or char == "\x7f" for char in lost)
    has_last_bytes = all(_last_symbol(chr(code)) in vocabulary for code in _LAST_BYTES)
    return lost if is_control and has_last_bytes else None


def _last_symbol(char: str) -> str:
    """Return what byte-level tokenizers write for the last byte of a character."""
    ((symbols, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(char)
    return symbols[-1]
