"""Which bytes tokens stand for, and where they break a character off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model.text.token_bytes import TokenBytes, begun
from common.model.tiny import EOS_ID, make_byte_tokenizer
from tests.support.vocabularies import make_fallback_tokenizer, make_spaced_tokenizer, make_word_tokenizer


@given(st.binary(max_size=5), st.characters(exclude_categories=["Cs"]), st.integers(1, 3))
def test_character_is_begun_until_its_last_byte(before: bytes, character: str, num_bytes: int) -> None:
    """Whatever stands before it."""
    data = character.encode()
    part = data[:num_bytes] if num_bytes < len(data) else b""

    assert begun(before + b"a" + part) == part
    assert begun(before + data) == b""


@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xc1", b"\xe0\x80", b"\xed\xa0", b"\xf4\x90", b"\xf5"])
def test_bytes_that_no_byte_completes_begin_nothing(data: bytes) -> None:
    """They are shown as they are; the fifth would be half of a surrogate."""
    assert begun(data) == b""


def test_tokens_of_byte_level_vocabularies_are_bytes() -> None:
    """Tokens that were added are so by their characters; an id without a token is nothing."""
    backend = make_byte_tokenizer().backend_tokenizer
    backend.add_tokens(["語"])
    of = TokenBytes(backend).of

    assert [of(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert (of(EOS_ID), of(259), of(9999)) == (b"<eos>", "語".encode(), None)


def test_tokens_of_other_vocabularies_are_text_but_for_those_of_the_fallback() -> None:
    """Only a decoder that has the fallback makes runs of them."""
    fallback = TokenBytes(make_fallback_tokenizer().backend_tokenizer)
    words = TokenBytes(make_word_tokenizer().backend_tokenizer)

    assert (fallback.of(6 + 0xE9), fallback.of(5), fallback.of(9999)) == (b"\xe9", None, None)
    assert (fallback.has_runs, words.has_runs, words.of(3)) == (True, False, None)
    assert TokenBytes(make_spaced_tokenizer().backend_tokenizer).has_runs
