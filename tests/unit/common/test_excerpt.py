"""A quoted text has a limit, and shows when it was cut."""

from __future__ import annotations

import pytest

from common.excerpt import MARK, SHOWN_CHARS, around_difference, excerpt, printable, visible


@pytest.mark.parametrize("text", ["", "short", "x" * SHOWN_CHARS])
def test_a_text_within_the_limit_is_shown_in_full(text: str) -> None:
    """The limit itself is allowed."""
    assert excerpt(text) == text


def test_a_longer_text_is_cut_and_says_so() -> None:
    """The mark counts, so that the result is never longer than the limit."""
    assert excerpt("abcdefg", 5) == "abcd" + MARK
    assert len(excerpt("x" * 4_000_000)) == SHOWN_CHARS


LONG = "0123456789" * 100


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("one", "two" + LONG, ("one", "two" + LONG[:196] + MARK)),
        ("a" * 200, "a" * 199, ("a" * 200, "a" * 199)),
        (LONG + "x", LONG + " x", (MARK + LONG[-60:] + "x", MARK + LONG[-60:] + " x")),
        (LONG + LONG, LONG, (MARK + LONG[-60:] + LONG[:138] + MARK, MARK + LONG[-60:])),
    ],
    ids=["at the start", "short", "at the end", "one goes on"],
)
def test_two_texts_are_shown_where_they_part(first: str, second: str, shown: tuple[str, str]) -> None:
    """Long ones from sixty characters before that place, with a mark for all that is left out."""
    assert around_difference(first, second) == shown


def test_what_goes_to_a_log_steers_no_terminal() -> None:
    """Control characters, line breaks and marks of direction are left out; other scripts are not."""
    assert printable("a\x1b[31m\nb\u202e\x7f é 語") == "a[31mb é 語"
    assert printable("x" * 9, 5) == "xxxx…"


@pytest.mark.parametrize(
    ("character", "shown"),
    [("\x1b", r"\x1b"), ("\x7f", r"\x7f"), ("\x9b", r"\x9b"), ("\u2028", r"\u2028"), ("\u202e", r"\u202e")],
    ids=["escape", "delete", "the escape above ASCII", "line separator", "right to left"],
)
def test_what_is_printed_shows_what_would_steer_a_terminal(character: str, shown: str) -> None:
    """Nothing is lost; line breaks of our own stay, and so do other scripts."""
    assert visible(f"é 語\n{character}[2J") == f"é 語\n{shown}[2J"
