"""How much is shown of a text that somebody else chose.

Theory of operation: values of a peer stand in errors, logs and answers to clients. A peer that is broken or
hostile may send megabytes of them, so whoever quotes one quotes its start. What would steer a terminal is
left out of a short text of a peer, and at the latest where a line is written it is escaped.
"""

from __future__ import annotations

SHOWN_CHARS = 200
"""A digest, a path or a short list in full."""

BEFORE_CHARS = 60
"""Shown of two texts before the place where they begin to differ."""

MARK = "…"
"""Stands for what was left out."""


def excerpt(text: str, limit: int = SHOWN_CHARS) -> str:
    """Return a text of at most `limit` characters; one that was longer ends with `MARK`."""
    return text if len(text) <= limit else text[: limit - len(MARK)] + MARK


def around_difference(first: str, second: str, limit: int = SHOWN_CHARS) -> tuple[str, str]:
    """Return two texts as at most `limit` characters of each, with the place where they part."""
    start = common_length(first, second) - BEFORE_CHARS
    if start <= 0 or max(len(first), len(second)) <= limit:
        return excerpt(first, limit), excerpt(second, limit)
    return excerpt(MARK + first[start:], limit), excerpt(MARK + second[start:], limit)


def printable(text: str, limit: int = SHOWN_CHARS) -> str:
    """Return the excerpt of what a person can see of a text: without control characters and line breaks."""
    return excerpt("".join(filter(str.isprintable, text[: 2 * limit])), limit)


def visible(text: str) -> str:
    """Return a text with escapes for what would steer a terminal; line breaks stay."""
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def common_length(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    # Halving compares slices as native code does; a loop over megabytes of a peer would hold up all sessions.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shown(character: str) -> str:
    is_plain = character.isprintable() or character == "\n"
    return character if is_plain else character.encode("unicode_escape").decode()
