"""Medians, spreads and ratios of samples that were taken side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and how far single values lie from it."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of at least one value."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no value")
    return Spread(median(ordered), ordered[0], ordered[-1], len(ordered))


def paired_ratios(above: Mapping[int, float], below: Mapping[int, float]) -> tuple[float, ...]:
    """Return above ÷ below for every round that has both, in order of the rounds.

    Both stood side by side in a round, so that what slowed the machine down then cancels out.
    """
    return tuple(above[index] / below[index] for index in sorted(above.keys() & below.keys()))
