"""What an audit found: each breach with its rule and the line that shows it.

Rules R1 to R9 are those of the design; `CHAIN` is a line removed, doubled, moved or altered, `FORMAT` a line
that does not say what its event must say.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MAX_KEPT = 1000
"""Findings kept in full; more are only counted, so that a bad journal cannot fill the memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """One line of one file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of one rule."""

    rule: str
    place: Place
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.problem}"


class Findings:
    """Collects breaches."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._counts: Counter[str] = Counter()

    @property
    def kept(self) -> tuple[Finding, ...]:
        """The first findings, by file and line."""
        return tuple(sorted(self._kept, key=lambda one: (one.place.file, one.place.line)))

    @property
    def counts(self) -> dict[str, int]:
        """Breaches by rule, those not kept included."""
        return dict(sorted(self._counts.items()))

    def add(self, rule: str, place: Place, problem: str) -> None:
        """Note a breach."""
        self._counts[rule] += 1
        if len(self._kept) < MAX_KEPT:
            self._kept.append(Finding(rule, place, problem))
