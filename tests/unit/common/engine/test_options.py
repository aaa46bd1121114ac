"""Options of an engine: read by name, refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.engine.options import Options
from common.errors import ConfigError

FIELD = "engine_option"


def test_options_are_read_by_their_type() -> None:
    """What was given, or the default of whoever asks."""
    options = Options(FIELD, ["widths=128,512", "device=NPU", "rate=2.5", "parts=3", "url=a=b"])

    assert options.integers("widths", (7,)) == (128, 512)
    assert options.choice("device", ("CPU", "NPU"), "CPU") == "NPU"
    assert options.number("rate", 1.0) == 2.5
    assert options.integer("parts", 1) == 3
    assert options.text("url") == "a=b"
    assert (options.integer("layers", 5), options.integers("stops", (2, 4))) == (5, (2, 4))
    options.close()


def test_an_option_that_nobody_asked_for_is_refused_with_those_there_are() -> None:
    """A typing mistake would else be a setting that does nothing."""
    options = Options(FIELD, ["width=128"])
    options.integers("widths", (7,))
    options.integer("parts", 1)

    with pytest.raises(
        ConfigError, match=r"engine_option=width=128: no such option; there are: widths, parts"
    ):
        options.close()


@pytest.mark.parametrize("given", ["widths", "=3", ""])
def test_an_option_without_key_or_value_is_refused(given: str) -> None:
    """As it was typed."""
    with pytest.raises(ConfigError, match="is not KEY=VALUE"):
        Options(FIELD, [given])


def test_an_option_that_is_given_twice_is_refused() -> None:
    """The second would win or lose without a word."""
    with pytest.raises(ConfigError, match="parts is given twice, first as '3'"):
        Options(FIELD, ["parts=3", "parts=4"])


@pytest.mark.parametrize(
    ("given", "ask", "problem"),
    [
        ("n=x", lambda options: options.integer("n", 1), "whole number within"),
        ("n=-1", lambda options: options.integer("n", 1), "whole number within"),
        ("n=1_000", lambda options: options.integer("n", 1), "whole number within"),
        ("n=9", lambda options: options.integer("n", 1, maximum=8), r"within \[0, 8\]"),
        ("n=" + "9" * 5000, lambda options: options.integer("n", 1), "whole number within"),
        ("n=4,2", lambda options: options.integers("n", ()), "must ascend"),
        ("n=2,2", lambda options: options.integers("n", ()), "must ascend"),
        ("n=0,2", lambda options: options.integers("n", ()), "whole number within"),
        ("n=nan", lambda options: options.number("n", 1), "must be a number"),
        ("n=inf", lambda options: options.number("n", 1), "must be a number"),
        ("n=z", lambda options: options.number("n", 1), "must be a number"),
        ("n=GPU", lambda options: options.choice("n", ("CPU", "NPU"), "CPU"), "must be one of CPU, NPU"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(
    given: str, ask: Callable[[Options], object], problem: str
) -> None:
    """With the option, what was given, and what would do."""
    with pytest.raises(ConfigError, match=problem) as refused:
        ask(Options(FIELD, [given]))

    assert (refused.value.field, refused.value.value) == (FIELD, given)
