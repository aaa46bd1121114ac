"""Medians and ratios of samples taken side by side."""

from __future__ import annotations

import pytest

from kvspan.bench.summary import Spread, paired_ratios, spread


def test_spread_is_the_median_between_the_extremes() -> None:
    """The order of the samples does not matter."""
    assert spread([7.0, 2.0, 3.0]) == Spread(median=3.0, low=2.0, high=7.0, count=3)


def test_median_of_an_even_number_lies_between_two_samples() -> None:
    """Neither middle sample is preferred."""
    assert spread([4.0, 2.0, 9.0, 3.0]).median == 3.5


def test_nothing_has_no_spread() -> None:
    """A missing measurement is an error, never a zero."""
    with pytest.raises(ValueError, match="no value"):
        spread([])


def test_ratio_is_taken_inside_each_round() -> None:
    """A machine twice as slow in one round changes no ratio."""
    assert paired_ratios({0: 6.0, 1: 12.0}, {0: 3.0, 1: 6.0}) == (2.0, 2.0)


def test_round_without_a_partner_has_no_ratio() -> None:
    """Only what stood side by side is compared."""
    assert paired_ratios({0: 6.0, 2: 5.0}, {2: 2.0, 3: 7.0}) == (2.5,)
