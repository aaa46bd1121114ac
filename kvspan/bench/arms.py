"""The ways a prompt can take, compared in one run.

Theory of operation: every round has every arm once, so that a change of the machine's speed meets all of
them. Odd rounds run in reverse, and each pair of rounds starts one arm later, so that no arm always follows
the same one. `stream_again` is `stream` once more: how far the two differ is how far arms differ by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way, as the options of a request."""

    name: str
    route: Literal["remote", "local"]
    transfer: Literal["stream", "deferred", "whole"] | None


STREAM = Arm("stream", "remote", "stream")
WHOLE = Arm("whole", "remote", "whole")
DEFERRED = Arm("deferred", "remote", "deferred")
LOCAL = Arm("local", "local", None)
STREAM_AGAIN = Arm("stream_again", "remote", "stream")

ARMS = (STREAM, WHOLE, DEFERRED, LOCAL, STREAM_AGAIN)

KVSPAN = "kvspan"
GENERATE = "generate"

DECODERS = (KVSPAN, GENERATE)
"""Who decodes: the pair, or transformers' own loop in a process of its own."""


def in_order(arms: Sequence[T], round_index: int) -> tuple[T, ...]:
    """Return all arms in the order of one round."""
    first = (round_index // 2) % len(arms)
    order = (*arms[first:], *arms[:first])
    return order[::-1] if round_index % 2 else order
