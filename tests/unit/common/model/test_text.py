"""Tests of common/model/text.py."""

import os
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.errors import ConfigError, InvalidRequest
from common.model.demo import cache_folder, demo_checkpoint
from common.model.text import TextStream, Tokenizer
from common.model.tiny import BOS_ID, EOS_ID, make_byte_tokenizer

BYTES = Tokenizer(make_byte_tokenizer())


def make_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer whose unknown characters are runs of byte tokens, with spaces inside the words."""
    words = ["<eos>", "▁", "▁the", "▁cat", "s", "é"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


FALLBACK = make_fallback_tokenizer()


def stream(tokenizer: Tokenizer, pieces: Iterable[Sequence[int]]) -> list[str]:
    """Return every delta of a stream that gets its tokens in these pieces."""
    text = TextStream(tokenizer)
    return [*(text.push(piece) for piece in pieces), text.flush()]


def test_text_and_chat_get_the_model_s_special_tokens() -> None:
    """A text starts as the model wants it, a chat as the template says, and neither twice."""
    assert BYTES.encode("hi") == [BOS_ID, *b"hi"]
    assert BYTES.encode_chat([{"role": "user", "content": "hi"}]) == [BOS_ID, *b"user: hi\nassistant: "]


def test_chat_without_template_is_the_client_s_error() -> None:
    """A model that has no chat template refuses messages by the field `chat`."""
    with pytest.raises(InvalidRequest) as refusal:
        FALLBACK.encode_chat([{"role": "user", "content": "hi"}])

    assert [violation.field for violation in refusal.value.violations] == ["chat"]


def test_chat_the_template_refuses_is_the_client_s_error() -> None:
    """What a template raises becomes a violation of the field `chat`."""
    with pytest.raises(InvalidRequest) as refusal:
        BYTES.encode_chat([{"role": "user"}])

    assert [violation.field for violation in refusal.value.violations] == ["chat"]


def test_tokenizer_without_backend_is_refused() -> None:
    """A tokenizer that cannot be streamed is a configuration error."""
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer(object())


def test_vocabulary_and_eos_are_those_of_the_tokenizer() -> None:
    """Specials count, and the end-of-text token is the declared one."""
    assert (BYTES.vocab_size, BYTES.eos_id) == (259, EOS_ID)


def test_character_comes_whole_when_its_last_byte_does() -> None:
    """Deltas of a character of four bytes are empty until the fourth."""
    assert stream(BYTES, [[byte] for byte in "a😀b".encode()]) == ["a", "", "", "", "😀", "b", ""]


def test_unfinished_character_appears_at_the_end_only() -> None:
    """Bytes that never become a character are shown as U+FFFD by the flush."""
    assert stream(BYTES, [[byte] for byte in b"a\xf0\x9f"]) == ["a", "", "", "\ufffd"]


def test_invalid_bytes_do_not_hold_text_back() -> None:
    """Of bytes that cannot begin a character only the last is held."""
    assert stream(BYTES, [[0xFF], [0xFF], [0xFF], [0x41]]) == ["", "\ufffd", "\ufffd", "\ufffdA", ""]


def test_special_tokens_are_no_text() -> None:
    """A special token between two bytes of a character changes nothing."""
    assert stream(BYTES, [[0xC3], [EOS_ID], [0xA9], [BOS_ID]]) == ["", "", "é", "", ""]


def test_space_of_the_first_word_is_dropped_and_of_others_kept() -> None:
    """A decoder that strips the start of a text strips it once, not at every delta."""
    assert stream(FALLBACK, [[2], [3], [4], [1], [3]]) == ["the", " cat", "s", " ", " cat", ""]


def test_run_of_byte_tokens_comes_when_it_ends() -> None:
    """Byte-fallback tokens are decoded as a run, so a run is held until another token follows."""
    run = [6 + byte for byte in "漢".encode()]

    assert stream(FALLBACK, [[3], [run[0]], [run[1]], [run[2]], [4]]) == ["cat", "", "", "", "漢s", ""]


@pytest.mark.parametrize("silent", [0, 9999], ids=["special token", "id without a token"])
def test_token_that_is_no_text_does_not_end_a_run(silent: int) -> None:
    """A run of bytes goes on behind a token that decoding drops."""
    run = [6 + byte for byte in "é".encode()]

    assert stream(FALLBACK, [[run[0], silent], [run[1]], [silent], [4]]) == ["", "", "", "és", ""]


@given(st.lists(st.lists(st.integers(0, 258), max_size=5), max_size=40))
def test_deltas_add_up_to_the_decoded_bytes(pieces: list[list[int]]) -> None:
    """However the tokens come and whatever the bytes, the deltas are the decoded text."""
    ids = [token for piece in pieces for token in piece]

    assert "".join(stream(BYTES, pieces)) == BYTES.decode(ids)


@given(st.text(), st.data())
def test_no_delta_shows_half_a_character(text: str, data: st.DataObject) -> None:
    """Deltas of valid text contain no U+FFFD that the text does not contain."""
    ids = list(text.replace("\ufffd", "").encode())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pieces = [ids[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True)]

    assert not any("\ufffd" in delta for delta in stream(BYTES, pieces))


@given(st.lists(st.lists(st.integers(0, 261), max_size=4), max_size=30))
def test_deltas_add_up_with_byte_fallback(pieces: list[list[int]]) -> None:
    """The same holds for runs of byte tokens, which turn invalid as a whole."""
    ids = [token for piece in pieces for token in piece]

    assert "".join(stream(FALLBACK, pieces)) == FALLBACK.decode(ids)


@pytest.mark.demo
def test_demo_tokenizer_streams_emoji_whole() -> None:
    """A real vocabulary splits emoji over tokens; every delta is still whole text."""
    folder = demo_checkpoint(cache_folder(os.environ))
    if folder is None:
        pytest.skip("the demo model is not in the cache")
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    text = "wörld 😀👩‍👩‍👧 漢字 1234\n\n  end"

    deltas = stream(tokenizer, [[token] for token in tokenizer.encode(text)])

    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
