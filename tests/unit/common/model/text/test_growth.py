"""Tests of `common/model/text/growth.py`."""

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from common.model.text.growth import MAX_GROWTH, growth

CHARACTERS = "aX \t\x00\x7f中é▁\U0010fffd" + "".join(
    one for one in map(chr, range(sys.maxunicode + 1)) if unicodedata.decomposition(one) or one.lower() != one
)

RULES: list[Any] = [
    normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase(),
    normalizers.BertNormalizer(), normalizers.Strip(), normalizers.StripAccents(), normalizers.Nmt(),
    normalizers.ByteLevel(), normalizers.Prepend("▁"), normalizers.Replace("a", "bcd"),
    normalizers.Replace("中", "x"), normalizers.Replace(Regex("q*"), "yz"),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace("▁", "abcd")]),
    pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Metaspace(),
    pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]),
]  # fmt: skip


def written(rule: Any) -> dict[str, Any]:
    """Return a rule as files have it."""
    backend, name = Tokenizer(models.BPE()), "normalizer"
    if isinstance(rule, pre_tokenizers.PreTokenizer):
        name = "pre_tokenizer"
    setattr(backend, name, rule)
    made: dict[str, Any] = json.loads(backend.to_str())[name]
    return made


def num_bytes(rule: Any, text: str) -> int:
    """Return the bytes of a text after a rule."""
    if isinstance(rule, normalizers.Normalizer):
        return len(rule.normalize_str(text).encode())
    return sum(len(word.encode()) for word, _ in rule.pre_tokenize_str(text))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_no_rule_makes_more_of_a_character_than_it_is_said_to(rule: Any) -> None:
    """Of any that decomposes or has another case, alone and in a run."""
    factor = growth(written(rule))

    for text in (*CHARACTERS, CHARACTERS[:2000]):
        assert num_bytes(rule, text) <= factor * max(1, len(text.encode())) + 4, repr(text)


def test_rules_multiply() -> None:
    """Which is how a file of a kilobyte takes all memory."""
    doubling = normalizers.Replace("a", "aa")

    assert growth(written(normalizers.Sequence([doubling] * 30))) == 2**30
    assert growth(written(pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 30))) == 4**30
    assert growth(None) == 1


def test_rules_of_known_models_are_far_below_the_limit() -> None:
    """ALBERT's are those that multiply most."""
    replace = {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    kinds = [{"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")]
    charsmap = base64.b64encode(b"\2\0\0\0__" + "\ufdfa".encode() * 11 + b"\0b").decode()
    precompiled = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    rule = {"type": "Sequence", "normalizers": [replace, *kinds, precompiled, spaces]}

    assert growth(precompiled) == 33
    assert growth(rule) * growth({"type": "Metaspace"}) < MAX_GROWTH
