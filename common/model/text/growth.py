"""How much longer than it came a tokenizer may make a text before it looks for tokens, known from its rules.

Theory of operation: each rule multiplies the bytes of a text by at most a factor, and rules in sequence by
the product of theirs. A library normalises added tokens already while it loads a tokenizer, so rules that
could take all memory are refused before.

Not here: the time and the memory that reading a text takes (`process.py`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from math import prod
from typing import Any

MAX_GROWTH = 1 << 14
"""Rules of known models have a tenth of it at most, counted so: they compose, map and replace spaces."""

_SEQUENCES = ("normalizers", "pretokenizers")

_FACTORS = {
    "BertNormalizer": 8,
    "ByteLevel": 4,
    "Lowercase": 2,
    "Metaspace": 8,
    "NFC": 4,
    "NFD": 4,
    "NFKC": 11,
    "NFKD": 11,
}
"""Of rules without texts of their own, some of which put a space before words; others make nothing longer."""


def growth(rule: Mapping[str, Any] | None) -> float:
    """Return how many times its bytes a text may have after a normalizer or a pre-tokenizer."""
    if rule is None:
        return 1
    kind = rule["type"]
    if kind == "Sequence":
        return prod(growth(one) for name in _SEQUENCES for one in rule.get(name, ()))
    if kind == "Prepend":
        return 1 + len(rule["prepend"].encode())
    if kind == "Replace":
        # A regular expression may match nothing at every place.
        replaced, content = rule["pattern"].get("String", ""), len(rule["content"].encode())
        return max(1, content / len(replaced.encode())) if replaced else 1 + content
    if kind == "Precompiled":
        return _longest_mapped(base64.b64decode(rule["precompiled_charsmap"] or ""))
    return _FACTORS.get(kind, 1)


def _longest_mapped(charsmap: bytes) -> int:
    """Return the bytes of the longest text in a map of SentencePiece, in which texts follow an index."""
    index_bytes = int.from_bytes(charsmap[:4], "little")
    return max(1, *map(len, charsmap[4 + index_bytes :].split(b"\0")))
