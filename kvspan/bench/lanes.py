"""Which part of a decode run counts: steps in which every lane was active, at the context asked for.

Theory of operation: lanes join one after another, as their prompts are computed. The interval begins with the
first step of the lane that joined last and has a fixed number of steps of that lane:

    lane 0   p......t t t t t t t|t t t t|      p prompt, t token
    lane 1     ....p......t t t t|t t t t|
    lane 2           ....p......t|t t t t|
                                 ^ interval: all lanes, whole steps

Early lanes have generated meanwhile. So that the mean context at the interval's begin is the one asked for,
their prompts are shorter by what they generated before the interval in the round before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MIN_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Interval:
    """The steps that count."""

    context_tokens: float
    """Mean over the lanes when it began."""

    num_tokens: int
    step_s: tuple[float, ...]
    tokens_before: tuple[int, ...]
    """Tokens that each lane had generated when it began."""


class LaneWatch:
    """Notes when tokens come, until the interval is complete."""

    def __init__(self, prompt_lens: Sequence[int], num_steps: int) -> None:
        self._prompt_lens = tuple(prompt_lens)
        self._num_steps = num_steps
        self._times_ns: list[list[int]] = [[] for _ in prompt_lens]
        # Invariant: one time a token, ascending.

    @property
    def is_complete(self) -> bool:
        """Whether the lane that joined last has made its steps."""
        return all(self._times_ns) and len(self._times_ns[self._last()]) >= self._num_steps + 2

    def arrived(self, lane: int, num_tokens: int, now_ns: int) -> None:
        """Note tokens of one lane."""
        self._times_ns[lane] += [now_ns] * num_tokens

    def interval(self) -> Interval:
        """Return the steps that count; only when complete."""
        own_ns = self._times_ns[self._last()][1 : self._num_steps + 2]
        start_ns, stop_ns = own_ns[0], own_ns[-1]
        before = tuple(sum(time_ns <= start_ns for time_ns in times) for times in self._times_ns)
        inside = sum(start_ns < time_ns <= stop_ns for times in self._times_ns for time_ns in times)
        contexts = [length + made for length, made in zip(self._prompt_lens, before, strict=True)]
        return Interval(
            context_tokens=sum(contexts) / len(contexts),
            num_tokens=inside,
            step_s=steps_s(own_ns),
            tokens_before=before,
        )

    def _last(self) -> int:
        return max(range(len(self._times_ns)), key=lambda lane: self._times_ns[lane][0])


def steps_s(times_ns: Sequence[int]) -> tuple[float, ...]:
    """Return the durations between consecutive times in seconds."""
    return tuple((after - before) / 1e9 for before, after in pairwise(times_ns))


def prompt_lens(context: int, tokens_before: Sequence[int]) -> tuple[int, ...]:
    """Return prompts with which lanes that generate `tokens_before` reach `context` tokens."""
    return tuple(max(MIN_PROMPT_TOKENS, context - made) for made in tokens_before)
