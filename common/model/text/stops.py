"""Where a stop string ends a text that arrives in pieces.

Theory of operation: the match that is complete first wins, and of several complete at the same character the
longest; so the outcome does not depend on how the text is cut into deltas. Text that may be the beginning
of a stop string is held back: the longest end of the text that is a proper beginning of one.

Special tokens are no text, so a stop string that is one ends the answer by its id, and one that has one
among other text would never be found.

Not here: stop token ids (`decode_service/generate/answer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def special_stop_ids(stops: Iterable[str], special_tokens: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of the special tokens that are stop strings."""
    return frozenset(special_tokens[stop] for stop in stops if stop in special_tokens)


def unreachable_stops(stops: Iterable[str], special_tokens: Iterable[str]) -> list[tuple[str, str]]:
    """Return the stop strings that have a special token among other text, each with that token."""
    return [
        (stop, special) for stop in stops for special in special_tokens if special in stop and special != stop
    ]


class StopMatcher:
    """Passes text on up to the first stop string, which it swallows."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError when a stop string is empty."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        # Invariant: a proper beginning of a stop string, or empty; empty once stopped.
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._is_stopped

    def push(self, delta: str) -> str:
        """Take more text and return what may be shown; nothing after a match."""
        if self._is_stopped:
            return ""
        text = self._held + delta
        start = self._first_match(text)
        if start is not None:
            self._is_stopped, self._held = True, ""
            return text[:start]
        held_len = self._beginning_len(text)
        self._held = text[len(text) - held_len :]
        return text[: len(text) - held_len]

    def flush(self) -> str:
        """Return what was held back: the text is over, and it was no stop string after all."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> int | None:
        """Return where the stop string begins that is complete first, the longest of several."""
        found = [(text.find(stop), stop) for stop in self._stops]
        complete = [(start + len(stop), start) for start, stop in found if start >= 0]
        return min(complete)[1] if complete else None

    def _beginning_len(self, text: str) -> int:
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        ends = (
            length
            for length in lengths
            if any(len(stop) > length and stop.startswith(text[-length:]) for stop in self._stops)
        )
        return next(ends, 0)
