"""What the tokens of one request mean: text, and when it ends."""

import pytest

from common.errors import EngineFailed
from common.model.tiny import EOS_ID
from decode_service.generate.answer import FinishReason
from tests.support.decoding import generate, logits_of, make_answer, make_request


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


def test_a_stop_id_ends_without_its_text() -> None:
    """Whichever token the request names."""
    events = generate(make_answer(make_request(stop_ids=frozenset({ord("y")}))), b"xyz")

    assert [event.text for event in events] == ["x", ""]
    assert events[-1].finish is FinishReason.STOP


def test_an_ignored_end_of_sequence_goes_on() -> None:
    """Without stop ids only length and stop strings end."""
    events = generate(make_answer(make_request(stop_ids=frozenset())), [EOS_ID, *b"xyz"])

    assert "".join(event.text for event in events) == "xyz"
    assert events[-1].finish is FinishReason.LENGTH


def test_a_stop_string_over_several_tokens_ends_and_is_not_shown() -> None:
    """Its beginning is held back until it is known what it is."""
    events = generate(make_answer(make_request(max_new_tokens=9, stop=("END",))), b"aEEND!")

    assert [event.text for event in events] == ["a", "", "E", "", ""]
    assert events[-1].finish is FinishReason.STOP


def test_text_held_back_for_a_stop_string_is_shown_when_it_was_none() -> None:
    """Nothing is lost at the end."""
    events = generate(make_answer(make_request(max_new_tokens=4, stop=("END",))), b"axEN")

    assert [event.text for event in events] == ["a", "x", "", "EN"]
    assert events[-1].finish is FinishReason.LENGTH


def test_text_held_back_is_shown_when_a_stop_id_follows() -> None:
    """A beginning of a stop string that never came is part of the answer."""
    events = generate(make_answer(make_request(max_new_tokens=9, stop=("END",))), [*b"aE", EOS_ID])

    assert [event.text for event in events] == ["a", "", "E"]
    assert events[-1].finish is FinishReason.STOP


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    """Of several ends at one token the stop comes before the length."""
    events = generate(make_answer(make_request(max_new_tokens=2, stop=("xy",))), b"xy")

    assert [event.text for event in events] == ["", ""]
    assert events[-1].finish is FinishReason.STOP


def test_a_stop_id_in_the_last_token_is_a_stop() -> None:
    """As the client asked for it by name."""
    events = generate(make_answer(make_request(max_new_tokens=2)), [ord("x"), EOS_ID])

    assert events[-1].finish is FinishReason.STOP


def test_a_stop_id_is_never_part_of_a_stop_string() -> None:
    """The id is checked first, so its text completes nothing."""
    request = make_request(stop=("xy",), stop_ids=frozenset({ord("y")}))

    events = generate(make_answer(request), b"xy")

    assert [event.text for event in events] == ["", "x"]
    assert events[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("text", ["é", "語", "🙂"])
def test_a_character_is_never_split(text: str) -> None:
    """Tokens may be bytes; a delta has whole characters."""
    encoded = text.encode()

    events = generate(make_answer(make_request(max_new_tokens=len(encoded))), encoded)

    assert [event.text for event in events] == [""] * (len(encoded) - 1) + [text]


def test_a_character_cut_off_by_the_length_is_flushed() -> None:
    """What was generated is shown as far as it can be."""
    events = generate(make_answer(make_request(max_new_tokens=2)), "a語".encode())

    assert [event.text for event in events] == ["a", "\ufffd"]


def test_flushed_text_may_complete_a_stop_string() -> None:
    """The replacement of a broken character is text like any other."""
    request = make_request(max_new_tokens=2, stop=("a\ufffd",))

    events = generate(make_answer(request), "a語".encode())

    assert [event.text for event in events] == ["", ""]
    assert events[-1].finish is FinishReason.STOP


def test_a_stop_string_of_multi_byte_characters_ends() -> None:
    """Stop strings are text, whatever the tokens."""
    events = generate(make_answer(make_request(max_new_tokens=9, stop=("é!",))), "xé!y".encode())

    assert "".join(event.text for event in events) == "x"
    assert events[-1].finish is FinishReason.STOP


def test_logits_that_are_no_numbers_raise() -> None:
    """No token is invented."""
    answer = make_answer(make_request())

    with pytest.raises(EngineFailed):
        answer.accept(logits_of(65) * float("nan"))
