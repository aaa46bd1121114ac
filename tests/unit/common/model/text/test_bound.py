"""Tests of common/model/text/bound.py."""

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from common.model.folder.cache import cache_folder, demo_checkpoint
from common.model.text.bound import TextBound, text_bound
from common.model.tiny import make_byte_tokenizer

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
"""Turns each byte into a symbol."""

COMPOSED = "\u1f84"
DECOMPOSED = "\u03b1\u0313\u0301\u0345"


def bound_of(backend: Tokenizer) -> TextBound | None:
    """Return what is known of a tokenizer."""
    return text_bound(backend, lambda text: len(backend.encode(text, add_special_tokens=False).ids))


def make_byte_level(
    *, without: str = "", normalizer: Normalizer | None = None, first: PreTokenizer | None = None
) -> Tokenizer:
    """Return a tokenizer of bytes and the word `thethe`; `without` is a character whose bytes it lacks."""
    lacking = BYTES.pre_tokenize_str(without)[0][0] if without else ""
    words = [*sorted(set(BYTES.alphabet()) - set(lacking)), "he", "the", "thethe"]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [("h", "e"), ("t", "he"), ("the", "the")] if "h" not in lacking else []
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, BYTES]) if first else BYTES
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def make_fallback(**settings: Any) -> Tokenizer:
    """Return a tokenizer of a few words whose other characters are bytes."""
    words = ["<unk>", "▁", "s", "▁s", "▁s▁s", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [("▁", "s"), ("▁s", "▁s")]
    backend = Tokenizer(models.BPE(vocab, merges, **{"byte_fallback": True, **settings}))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def make_composing(normalizer: Normalizer) -> Tokenizer:
    """Return a tokenizer whose longest token is eight letters, each composed of four characters."""
    words = [COMPOSED, COMPOSED * 2, COMPOSED * 4, COMPOSED * 8, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [(word, word) for word in words[:3]]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    backend.normalizer = normalizer
    return backend


def make_added(token: AddedToken) -> Tokenizer:
    """Return a tokenizer with a token beside its vocabulary."""
    backend = make_byte_level()
    backend.add_special_tokens([token])
    return backend


BOUNDED = {
    "special tokens": (make_byte_tokenizer().backend_tokenizer, 5),
    "longest word": (make_byte_level(), 6),
    "longest added token": (make_added(AddedToken("<a long token>")), 14),
    "added token that swallows spaces": (make_added(AddedToken("<end>", rstrip=True)), 6),
    "control character of no token": (make_byte_level(without="\x04"), 6),
    "byte fallback": (make_fallback(), 4 * 8),
    "one token for all unknown": (make_fallback(unk_token="<unk>", fuse_unk=True), 4 * 8),
    "composed": (make_composing(normalizers.NFC()), 4 * 24),
    "composed of likes": (make_composing(normalizers.NFKC()), 4 * 24),
    "decomposed": (make_byte_level(normalizer=normalizers.NFKD()), 4 * 6),
    "replaced by less": (make_byte_level(normalizer=normalizers.Replace("xthe", "the")), 4 * 6),
    "split": (make_byte_level(first=pre_tokenizers.Split(" ", "isolated")), 6),
    "digits": (make_byte_level(first=pre_tokenizers.Digits()), 6),
    "spaces are dropped": (make_byte_level(first=pre_tokenizers.Split(" ", "removed")), 6),
}
"""Tokenizers, and the bytes that one of their tokens stands for at most."""

BOUNDS = {name: bound_of(backend) for name, (backend, _) in BOUNDED.items()}

UNBOUNDED = {
    "unknown characters are dropped": make_fallback(byte_fallback=False),
    "a run of unknown ones is a token": make_fallback(byte_fallback=False, unk_token="<unk>", fuse_unk=True),
    "unknown words are one token": Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "byte has no token": make_byte_level(without="é"),
    "letter has no token": make_byte_level(without="x"),
    "lost characters are made of others": make_byte_level(
        without="\x04", normalizer=normalizers.Replace("x", "\x04")
    ),
    "spaces are stripped": make_byte_level(normalizer=normalizers.Strip()),
    "accents are stripped": make_byte_level(normalizer=normalizers.StripAccents()),
    "characters are removed": make_byte_level(normalizer=normalizers.Replace("t", "")),
    "a pattern is replaced": make_byte_level(
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("t+"), "t")])
    ),
    "wide spaces are dropped": make_byte_level(first=pre_tokenizers.WhitespaceSplit()),
}

PIECES = [
    *("the", "thethe", "xthe", "s", " s", " ", "\n", "\u2003", "\x04", "7", "é", COMPOSED, DECOMPOSED),
    *("<end>", "<end>      ", "<a long token>", "<bos>"),
    # Three and one that become one, and one that becomes 18.
    *("\u1112\u1161\u11ab", "\u212a", "\ufdfa"),
]
TEXTS = st.lists(st.tuples(st.sampled_from(PIECES) | st.text(max_size=3), st.integers(1, 40))).map(
    lambda pieces: "".join(piece * count for piece, count in pieces)
)


def assert_bounded(backend: Tokenizer, bound: TextBound | None, text: str) -> None:
    """Check that a text has no fewer tokens than the bound says."""
    assert bound is not None
    num_tokens = len(backend.encode(text, add_special_tokens=False).ids)
    assert bound.count(text) <= bound.bytes_per_token * num_tokens


@pytest.mark.parametrize("name", BOUNDED)
def test_a_token_stands_for_no_more_than_its_text(name: str) -> None:
    """The longest of the vocabulary, times what a normaliser makes one byte of."""
    bound = BOUNDS[name]

    assert bound is not None
    assert bound.bytes_per_token == BOUNDED[name][1]


@pytest.mark.parametrize("name", BOUNDED)
def test_no_dense_text_that_fits_is_above_the_bound(name: str) -> None:
    """The texts with the most bytes a token are one piece again and again."""
    for piece in PIECES:
        assert_bounded(BOUNDED[name][0], BOUNDS[name], piece * 64)


@given(text=TEXTS)
def test_no_text_that_fits_is_above_the_bound(text: str) -> None:
    """Else a request would be refused that this service can serve."""
    for name, (backend, _) in BOUNDED.items():
        assert_bounded(backend, BOUNDS[name], text)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_there_is_no_bound_where_a_long_text_may_be_few_tokens(name: str) -> None:
    """Nothing is refused on a guess."""
    assert bound_of(UNBOUNDED[name]) is None


def test_characters_of_no_token_do_not_count() -> None:
    """A text of nothing else has no tokens, however long it is."""
    bound = BOUNDS["control character of no token"]
    swallowing = BOUNDS["added token that swallows spaces"]

    assert bound is not None
    assert swallowing is not None
    assert bound.count("\x04" * 100 + "the\x05") == 4
    assert swallowing.count(" \n\t" * 100 + "the\x04") == 4


@pytest.mark.demo
def test_the_bound_holds_for_the_demo_tokenizer() -> None:
    """A real vocabulary, which lacks some control characters."""
    folder = demo_checkpoint(cache_folder(os.environ))
    if folder is None:
        pytest.skip("the demo model is not in the cache")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bound = bound_of(backend)

    @given(text=TEXTS)
    def holds(text: str) -> None:
        assert_bounded(backend, bound, text)

    holds()
