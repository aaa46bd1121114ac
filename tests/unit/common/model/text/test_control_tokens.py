"""Tests of `common/model/text/control_tokens.py`."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, normalizers

from common.model.text.control_tokens import ControlTokens
from common.model.tiny import BOS_ID, EOS_ID, make_byte_tokenizer


def make_control(*added: AddedToken) -> ControlTokens:
    """Return <bos>, <eos> and these as the control tokens of a tokenizer of single bytes."""
    pretrained = make_byte_tokenizer()
    pretrained.add_tokens(list(added))
    return ControlTokens(pretrained.backend_tokenizer, [BOS_ID, EOS_ID, *range(259, 259 + len(added)), 9999])


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [""]),
        ("<pad> <eos", ["<pad> <eos"]),
        ("a<eos>", ["a", "<eos>", ""]),
        ("<eos><bos>é", ["", "<eos>", "", "<bos>", "é"]),
    ],
)
def test_text_is_split_at_its_control_tokens(text: str, pieces: list[str]) -> None:
    """They stand at odd places, whatever is beside them; other added tokens are text."""
    control = make_control()

    assert control.split(text) == pieces
    assert control.found(text) == pieces[1::2]


def test_white_space_that_a_token_takes_along_is_hidden_with_it() -> None:
    """It is part of what the tokenizer would cut out."""
    assert make_control(AddedToken("<l>", lstrip=True)).split("a  <l> b") == ["a", "  <l>", " b"]


@pytest.mark.parametrize("part", ["<e", "os>", " eos\n", "x <", "> y", "o", "<eo", "bos"])
def test_part_of_a_control_token_may_join(part: str) -> None:
    """At the end of a text, at its begin, or as the whole of it; templates trim."""
    assert make_control().may_join(part)


@pytest.mark.parametrize("text", ["", " ", "x<eos>y", "a < b", "eosin", "hello"])
def test_other_text_can_be_no_part(text: str) -> None:
    """Nor is what holds a whole one a part of another."""
    assert not make_control().may_join(text)


def test_ids_are_those_of_the_text_but_for_the_pieces_at_odd_places() -> None:
    """The first and the last piece may be empty, and the same piece may come twice."""
    ids = make_control().ids_of(["", "<eos>", "\n<bos>", "<eos>", ""])

    assert ids == [*b"<eos>\n", BOS_ID, *b"<eos>"]


def test_break_before_a_piece_is_no_part_of_its_ids() -> None:
    """Also where a normaliser takes breaks away."""
    pretrained = make_byte_tokenizer()
    pretrained.backend_tokenizer.normalizer = normalizers.Strip()

    assert ControlTokens(pretrained.backend_tokenizer, [EOS_ID]).ids_of(["a", "<eos>", "b"]) == [*b"a<eos>b"]
