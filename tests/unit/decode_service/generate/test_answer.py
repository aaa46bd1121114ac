"""What the tokens of one request mean: text, and when it ends."""

import pytest

from common.errors import EngineFailed
from common.model.text.tokenizer import Tokenizer
from common.model.tiny import EOS_ID
from decode_service.generate.answer import FinishReason
from decode_service.request import Request
from tests.support.decoding import generate, logits_of, make_answer, make_request
from tests.support.vocabularies import make_fallback_tokenizer


def test_tokens_become_text_until_the_length() -> None:
    """max_new_tokens is the number of tokens that are returned."""
    events = generate(make_answer(make_request(max_new_tokens=3)), b"xyz!")

    assert [event.sampled.token_id for event in events] == [*b"xyz"]
    assert [event.text for event in events] == ["x", "y", "z"]
    assert [event.finish for event in events] == [None, None, FinishReason.LENGTH]


def test_one_token_is_one_token() -> None:
    """The limit holds for the first token too (F1)."""
    answer = make_answer(make_request(max_new_tokens=1))

    (event,) = generate(answer, b"xy")

    assert (event.text, event.finish) == ("x", FinishReason.LENGTH)


def test_an_end_of_sequence_as_first_token_ends_the_answer() -> None:
    """It counts, and has no text (F2)."""
    (event,) = generate(make_answer(make_request()), [EOS_ID, 65])

    assert (event.sampled.token_id, event.text, event.finish) == (EOS_ID, "", FinishReason.STOP)


LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
ENDS: dict[str, tuple[Request, bytes | list[int], list[str], FinishReason]] = {
    "a stop id ends without its text": (
        make_request(max_new_tokens=4, stop_ids=frozenset(b"y")),
        b"xyz",
        ["x", ""],
        STOP,
    ),
    "without stop ids only length and stop strings end": (
        make_request(max_new_tokens=4, stop_ids=frozenset()),
        [EOS_ID, *b"xyz"],
        ["", "x", "y", "z"],
        LENGTH,
    ),
    "the beginning of a stop string is held back, and the string not shown": (
        make_request(max_new_tokens=9, stop=("END",)),
        b"aEEND!",
        ["a", "", "E", "", ""],
        STOP,
    ),
    "text held back is shown when it was no stop string": (
        make_request(max_new_tokens=4, stop=("END",)),
        b"axEN",
        ["a", "x", "", "EN"],
        LENGTH,
    ),
    "text held back is shown when a stop id follows": (
        make_request(max_new_tokens=9, stop=("END",)),
        [*b"aE", EOS_ID],
        ["a", "", "E"],
        STOP,
    ),
    "of several ends at one token the stop string comes before the length": (
        make_request(max_new_tokens=2, stop=("xy",)),
        b"xy",
        ["", ""],
        STOP,
    ),
    "and so does a stop id": (make_request(max_new_tokens=2), [ord("x"), EOS_ID], ["x", ""], STOP),
    "a stop id is never part of a stop string": (
        make_request(max_new_tokens=4, stop=("xy",), stop_ids=frozenset(b"y")),
        b"xy",
        ["", "x"],
        STOP,
    ),
    "a character is never split": (make_request(max_new_tokens=4), "🙂".encode(), ["", "", "", "🙂"], LENGTH),
    "nor shown in part where the length cuts it off": (
        make_request(max_new_tokens=2),
        "a語".encode(),
        ["a", ""],
        LENGTH,
    ),
    "nor where a stop id does": (make_request(), [*"a語".encode()[:3], EOS_ID], ["a", "", "", ""], STOP),
    "nor in a stop string": (
        make_request(max_new_tokens=2, stop=("a\ufffd",)),
        "a語".encode(),
        ["", "a"],
        LENGTH,
    ),
    "a stop string may have characters of several bytes": (
        make_request(max_new_tokens=9, stop=("é!",)),
        "xé!y".encode(),
        ["x", "", "", ""],
        STOP,
    ),
}


@pytest.mark.parametrize("rule", ENDS)
def test_the_text_and_the_end_of_an_answer(rule: str) -> None:
    """The rule is the name of the case: each delta, and why the last one is the last."""
    request, tokens, texts, finish = ENDS[rule]

    events = generate(make_answer(request), tokens)

    assert [event.text for event in events] == texts
    assert [event.finish for event in events] == [None] * (len(texts) - 1) + [finish]


def test_text_that_is_shown_at_the_end_may_complete_a_stop_string() -> None:
    """A run of byte tokens is decoded when it ends; that may be where the answer does."""
    request = make_request(max_new_tokens=4, stop=("漢",))
    answer = make_answer(request, Tokenizer(make_fallback_tokenizer()))

    events = generate(answer, [3, *(6 + byte for byte in "漢".encode())])

    assert [event.text for event in events] == [" cat", "", "", ""]
    assert events[-1].finish is STOP


def test_logits_that_are_no_numbers_raise() -> None:
    """No token is invented."""
    answer = make_answer(make_request())

    with pytest.raises(EngineFailed):
        answer.accept(logits_of(65) * float("nan"))
