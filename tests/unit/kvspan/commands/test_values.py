"""Lists of numbers are read, and sizes are written for people."""

from __future__ import annotations

import click
import pytest

from kvspan.commands.values import Integers, rounded_size


def test_numbers_are_separated_by_commas() -> None:
    """One is a list too."""
    assert Integers(0).convert("3,1,2", None, None) == (3, 1, 2)
    assert Integers(0).convert("7", None, None) == (7,)


@pytest.mark.parametrize(
    ("text", "rule"),
    [("3,,4", "is not a valid integer"), ("3,-4", "-4 is not in the range 0<=x"), ("", "valid")],
)
def test_each_number_is_within_bounds(text: str, rule: str) -> None:
    """The one that is not is named."""
    with pytest.raises(click.BadParameter) as refusal:
        Integers(0).convert(text, None, None)

    assert rule in refusal.value.message


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(7, "7 B"), (39040, "38.1 KiB"), (268431360, "256.0 MiB"), (5 << 29, "2.5 GiB")]
)
def test_size_for_people_has_one_decimal(num_bytes: int, text: str) -> None:
    """What was measured is rounded; what was configured is not."""
    assert rounded_size(num_bytes) == text
