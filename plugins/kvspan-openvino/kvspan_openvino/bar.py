"""How far something is that takes long, for somebody who watches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def shown(what: str, steps: Sequence[T], is_watched: bool) -> Iterator[T]:
    """Yield each step; with a bar on stderr when somebody watches."""
    # Steps take long and are few: a bar that waits for them to be frequent would lag behind.
    yield from tqdm(steps, what, disable=not is_watched, mininterval=0, leave=False)
