"""What `bench quick` measures: lengths, repetitions and real text cut into prompts.

Theory of operation: the text is the prose of Python's own language reference, which every interpreter brings.
It is tokenised once; every prompt is the next stretch of it, counted in tokens, so that no prompt shares a
beginning with another and nothing can be served from a prefix that was computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

ANSWER_TOKENS = 1024
"""Room for the tokens that early lanes generate until the last lane has joined and the interval is over."""


@dataclass(frozen=True, slots=True)
class QuickPlan:
    """How much is measured."""

    prompts: tuple[int, ...] = (128, 512, 2048)
    """Prompt lengths in tokens."""

    repetitions: int = 5
    """Rounds whose samples count; each round has every arm once."""

    warmups: int = 1
    """Rounds before them; recorded, never counted."""

    lanes: tuple[int, ...] = (1, 4, 16)
    context: int = 512
    """Tokens a lane has seen when decode steps are timed; a mean over the lanes."""

    steps: int = 32
    """Decode steps of one sample."""

    idle_s: float = 5.0
    """Length of one look at the idle pair."""

    @property
    def rounds(self) -> range:
        """Return the numbers of all rounds; those below 0 are warm-up."""
        return range(-self.warmups, self.repetitions)

    @property
    def max_lanes(self) -> int:
        """Rows that the decode batch must have."""
        return max(self.lanes, default=1)

    @property
    def cache_tokens(self) -> int:
        """Size of the cache in which everything fits."""
        longest = max(self.prompts, default=0) + 1
        return max(self.max_lanes * (self.context + ANSWER_TOKENS), 2 * longest)


def smoke_plan() -> QuickPlan:
    """Return the least that passes through every part of a run."""
    return replace(
        QuickPlan(), prompts=(24, 80), repetitions=1, lanes=(1, 2), context=40, steps=4, idle_s=0.2
    )


def real_text() -> str:
    """Return about 460,000 characters of English prose, the same in every run of one Python release."""
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))


class PromptSource:
    """Cuts prompts of exact lengths out of one tokenised text, each with a beginning of its own.

    The text is read round and round; a place where a prompt has begun before is stepped over.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._next = 0
        self._begun: set[int] = set()

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """Return the next stretch of `num_tokens` tokens; raises ValueError when the text is too short."""
        size = len(self._token_ids)
        if num_tokens > size or len(self._begun) == size:
            raise ValueError(f"a text of {size} tokens gives no other prompt of {num_tokens}")
        while self._next in self._begun:
            self._next = (self._next + 1) % size
        start, stop = self._next, self._next + num_tokens
        self._begun.add(start)
        self._next = stop % size
        return self._token_ids[start:stop] + self._token_ids[: max(0, stop - size)]
