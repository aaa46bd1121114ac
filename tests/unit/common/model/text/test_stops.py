"""Tests of common/model/text/stops.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model.text.stops import StopMatcher


def naive_cut(text: str, stops: list[str]) -> str:
    """Return the text before the stop string that is complete first, the longest of several."""
    for stop_at in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:stop_at].endswith(stop)]
        if ending:
            return text[: stop_at - len(max(ending, key=len))]
    return text


def test_text_passes_when_there_are_no_stop_strings() -> None:
    """Without stop strings nothing is held back."""
    matcher = StopMatcher([])

    assert (matcher.push("abc"), matcher.flush(), matcher.is_stopped) == ("abc", "", False)


def test_beginning_of_a_stop_string_is_held_until_it_is_none() -> None:
    """What may become a stop string is not shown, and is shown once it cannot."""
    matcher = StopMatcher(["END"])

    assert [matcher.push(delta) for delta in ("aE", "N", "x")] == ["a", "", "ENx"]


def test_held_text_comes_at_the_end() -> None:
    """A beginning that the text ends with was text after all."""
    matcher = StopMatcher(["END"])

    assert (matcher.push("xEN"), matcher.flush(), matcher.flush()) == ("x", "EN", "")


def test_empty_stop_string_is_refused() -> None:
    """An empty stop string would end every text before it begins."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
)
def test_cut_is_that_of_the_naive_search_however_the_text_comes(deltas: list[str], stops: list[str]) -> None:
    """What is shown is the text before the first complete stop string, and never more on the way."""
    matcher = StopMatcher(stops)
    text = "".join(deltas)

    shown = "".join(matcher.push(delta) for delta in deltas) + matcher.flush()

    assert shown == naive_cut(text, stops)
    assert matcher.is_stopped == any(stop in text for stop in stops)
