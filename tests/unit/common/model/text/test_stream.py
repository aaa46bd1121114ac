"""The deltas of an answer are what it adds to its prompt, whole characters at a time."""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from common.excerpt import common_length
from common.model.folder.cache import cache_folder, demo_checkpoint
from common.model.text.stream import CONTEXT, TextStream
from common.model.text.tokenizer import Tokenizer
from common.model.tiny import BOS_ID, EOS_ID
from tests.support.vocabularies import VOCABULARIES, make_fallback_tokenizer, make_suffix_tokenizer

PRETRAINED = {name: make() for name, make in VOCABULARIES.items()} | {
    "fallback": make_fallback_tokenizer(),
    "suffixes": make_suffix_tokenizer(),
}
TOKENIZERS = {name: Tokenizer(pretrained) for name, pretrained in PRETRAINED.items()}
BYTES, FALLBACK, SCORES, WORDS, SUFFIXES = (
    TOKENIZERS[name] for name in ("bytes", "fallback", "scores", "words", "suffixes")
)

RUN = [6 + byte for byte in "漢é".encode()]
"""Five byte tokens of FALLBACK."""

NO_TOKEN = 9999


def stream(
    tokenizer: Tokenizer, pieces: Iterable[Sequence[int]], prompt_ids: Sequence[int] = ()
) -> list[str]:
    """Return every delta of an answer that gets its tokens in these pieces."""
    text = TextStream(tokenizer, prompt_ids)
    return [*(text.push(piece) for piece in pieces), text.flush()]


STREAMS: dict[str, tuple[Tokenizer, list[int], list[list[int]], list[str]]] = {
    "a character comes whole with its last byte": (
        BYTES,
        [],
        [[byte] for byte in "a😀b".encode()],
        ["a", "", "", "", "😀", "b", ""],
    ),
    "bytes that begin a character and do not end it are no text": (
        BYTES,
        [],
        [[byte] for byte in b"a\xf0\x9f"],
        ["a", "", "", ""],
    ),
    "nor at the end of a run": (FALLBACK, [], [[3], RUN[:4]], ["cat", "", "漢"]),
    "nor after bytes that begin none": (FALLBACK, [], [[6 + 0xFF], RUN[:1]], ["", "", "\ufffd"]),
    "bytes that begin no character are shown at once": (
        BYTES,
        [],
        [[0xFF], [0xFF], [0xED], [0xA0], [0x41]],
        ["\ufffd", "\ufffd", "", "\ufffd\ufffd", "A", ""],
    ),
    "U+FFFD that is written is a character like others": (
        BYTES,
        [],
        [[byte] for byte in "\ufffd".encode()],
        ["", "", "\ufffd", ""],
    ),
    "a special token is no text": (BYTES, [], [[0xC3], [EOS_ID], [0xA9], [BOS_ID]], ["", "", "é", "", ""]),
    "the space of the first word is dropped, once": (
        FALLBACK,
        [0],
        [[2], [3], [4], [1], [3]],
        ["the", " cat", "s", " ", " cat", ""],
    ),
    "the first word after a prompt has its space (Y13)": (FALLBACK, [0, 2], [[3], [4]], [" cat", "s", ""]),
    "also after a special token": (FALLBACK, [2, 0, 0], [[0], [3]], ["", " cat", ""]),
    "also where words have scores": (SCORES, [5], [[5], [6]], [" hi", "<", ""]),
    "also where words have none": (WORDS, [3], [[5], [4], [6]], [" no", "1", ".", ""]),
    "also where a space is written after a word": (SUFFIXES, [2], [[1], [3], [2]], [" a", "c", " b", ""]),
    "a character that the prompt begins belongs to the answer": (
        BYTES,
        [*b"a\xf0\x9f"],
        [[0x98], [0x80], [0x41]],
        ["", "😀", "A", ""],
    ),
    "what the prompt breaks off does not": (BYTES, [*b"a\xf0\x9f"], [[0x98], [0x41]], ["", "A", ""]),
    "also in a run": (FALLBACK, [3, RUN[0], RUN[1]], [[RUN[2]], [4]], ["", "漢s", ""]),
    "what follows a run of the prompt does not spoil it": (
        FALLBACK,
        [3, *RUN],
        [[6 + 0xFF], [4]],
        ["", "\ufffds", ""],
    ),
    "nor is it shown again": (FALLBACK, [3, *RUN, RUN[0]], [RUN[1:3], [4]], ["", "漢s", ""]),
    "a run of byte tokens comes when it ends": (
        FALLBACK,
        [],
        [[3], *([one] for one in RUN[:3]), [4]],
        ["cat", "", "", "", "漢s", ""],
    ),
    "a special token does not end a run": (
        FALLBACK,
        [],
        [[RUN[3], 0], [RUN[4]], [0], [4]],
        ["", "", "", "és", ""],
    ),
    "an id without a token does not end a run": (
        FALLBACK,
        [],
        [[RUN[3], NO_TOKEN], [RUN[4]], [NO_TOKEN], [4]],
        ["", "", "", "és", ""],
    ),
}


@pytest.mark.parametrize("rule", STREAMS)
def test_the_deltas_of_an_answer(rule: str) -> None:
    """The rule is the name of the case."""
    tokenizer, prompt_ids, pieces, deltas = STREAMS[rule]

    assert stream(tokenizer, pieces, prompt_ids) == deltas


def assert_adds_up(tokenizer: Tokenizer, ids: Sequence[int], cuts: Iterable[int]) -> None:
    """Check the text of an answer, which begins at the first cut and comes in pieces at the others."""
    places = [*sorted(cuts), len(ids)]
    prompt_ids = ids[: places[0]]
    before, whole = tokenizer.decode(prompt_ids), tokenizer.decode(ids)
    expected = whole[common_length(before, whole) :]

    if not whole.startswith(before.rstrip("\ufffd")):
        return  # what follows a run of byte tokens has made U+FFFD of all of it

    told = "".join(stream(tokenizer, [ids[start:stop] for start, stop in pairwise(places)], prompt_ids))

    if whole.endswith("\ufffd"):
        # Of what is no text the end may be missing; a run that it spoils is text without it.
        assert told.rstrip("\ufffd").startswith(expected.rstrip("\ufffd"))
    else:
        assert told == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_deltas_add_up_to_what_the_answer_adds_to_the_prompt(name: str, data: st.DataObject) -> None:
    """For every split of any tokens, whatever the decoder, in as many pieces as they come."""
    tokenizer = TOKENIZERS[name]
    token = st.integers(0, tokenizer.vocab_size) | st.sampled_from([0, 1, 2, 3])
    ids = data.draw(st.lists(token, max_size=5 * CONTEXT))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), min_size=1, max_size=6))

    assert_adds_up(tokenizer, ids, cuts)
    assert_adds_up(tokenizer, ids, range(cuts[0], len(ids)))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_whole_text_is_that_of_transformers(name: str, data: st.DataObject) -> None:
    """Without special tokens, with every space that the tokens have."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size)))

    assert tokenizer.decode(ids) == PRETRAINED[name].decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@given(st.text(), st.data())
def test_no_delta_shows_half_a_character(text: str, data: st.DataObject) -> None:
    """Deltas of valid text contain no U+FFFD, wherever the answer is cut off (Y14)."""
    ids = list(text.replace("\ufffd", "").encode())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pieces = [ids[start:stop] for start, stop in pairwise([0, *cuts])]

    assert not any("\ufffd" in delta for delta in stream(BYTES, pieces))


@pytest.mark.parametrize(
    ("tokenizer", "token_id"), [(BYTES, 0xFF), (BYTES, EOS_ID), (FALLBACK, 1), (FALLBACK, NO_TOKEN)]
)
def test_no_token_costs_more_than_those_before_it(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, token_id: int
) -> None:
    """What is decoded again with a token is a few others, also where all are alike: no text, or spaces."""
    decode, decoded = Tokenizer.decode, list[int]()

    def counted(self: Tokenizer, token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return decode(self, token_ids)

    monkeypatch.setattr(Tokenizer, "decode", counted)

    stream(tokenizer, [[token_id]] * 1000)

    assert max(decoded) <= 2 * CONTEXT + 1


@pytest.mark.demo
def test_demo_tokenizer_streams_emoji_whole() -> None:
    """A real vocabulary splits emoji over tokens; every delta is still whole text, after every prompt."""
    folder = demo_checkpoint(cache_folder(os.environ))
    if folder is None:
        pytest.skip("the demo model is not in the cache")
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    text = "wörld 😀👩‍👩‍👧 漢字 1234\n\n  end"
    ids = tokenizer.encode(text)

    for start in range(len(ids)):
        assert_adds_up(tokenizer, ids, range(start, len(ids)))
        assert "\ufffd" not in "".join(stream(tokenizer, [[token] for token in ids[:start]]))
