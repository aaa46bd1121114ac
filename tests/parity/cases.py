"""What is compared for parity, and how the comparison reads.

A case is a dtype, a chunk grid and some prompts. Every prompt is answered by every way, alone and with seven
other requests in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvspan.bench.arms import DEFERRED, LOCAL, STREAM, WHOLE, Arm

WAYS: tuple[Arm, ...] = (STREAM, WHOLE, DEFERRED, LOCAL)

PROMPT_LENS = (1, 5, 17, 63, 64, 65, 130, 257, 600, 1500)
"""Both sides of a page and of both grids, within the first chunk and over many."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of a pair, and what it is asked."""

    dtype: str
    chunk_tokens: int
    prompt_lens: tuple[int, ...] = PROMPT_LENS
    num_tokens: int = 24
    """Tokens of each answer."""

    def __str__(self) -> str:
        return f"{self.dtype}-chunk{self.chunk_tokens}"


SHORT = (Case("float32", 256, prompt_lens=(1, 17, 65, 200), num_tokens=6),)

FULL = tuple(Case(dtype, chunk) for dtype in ("float32", "bfloat16") for chunk in (256, 64))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer, held against the one it has to equal."""

    case: Case
    way: str
    company: str
    """`alone` or `among 8`."""

    prompt_len: int
    expected: tuple[int, ...]
    actual: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every token is the same."""
        return self.expected == self.actual

    def __str__(self) -> str:
        pairs = zip(self.expected, self.actual, strict=False)
        place = next((index for index, (want, got) in enumerate(pairs) if want != got), "the end")
        what = f"{self.case}, {self.way} {self.company}, prompt of {self.prompt_len}"
        return f"{what}: from token {place} on: {self.actual} instead of {self.expected}"


HEADS = ("case", "way", "company", "cases", "equal", "different")


def table_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield one aligned line for each case, way and company, and one for all."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((str(outcome.case), outcome.way, outcome.company), []).append(outcome)
    rows = [(*key, *_counts(group)) for key, group in groups.items()]
    rows.append(("all", "", "", *_counts(outcomes)))
    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    for row in (HEADS, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _counts(outcomes: Sequence[Outcome]) -> tuple[str, str, str]:
    equal = sum(each.is_equal for each in outcomes)
    return str(len(outcomes)), str(equal), str(len(outcomes) - equal)
