"""What a prefill service counts over its whole life, however many sessions come and go.

Theory of operation: each transfer that is accepted ends in exactly one of five ways, so

    accepted = done + failed + cancelled + expired + abandoned + those that live

whenever the event loop is not in the middle of a message. Ownership: one per service, written by the sessions
it counts, event loop only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import InvariantViolation
from common.session.prefill_side import IgnoredCounts


@dataclass(slots=True)
class Totals:
    """Counts since start; sessions that have ended are in them."""

    sessions_opened: int = 0
    """Answered with Welcome."""

    sessions_ended: int = 0
    """Of those, the ones whose stream has ended."""

    accepted: int = 0
    """Transfers that were queued."""

    done: int = 0
    failed: int = 0
    """By an error that is neither time nor credit."""

    cancelled: int = 0
    expired: int = 0
    """By their time limit, or without credit."""

    abandoned: int = 0
    """Queued or running when their session ended."""

    refused: int = 0
    """Never accepted."""

    sealed_spans: int = 0
    sealed_bytes: int = 0

    ignored: IgnoredCounts = field(default_factory=IgnoredCounts)
    """By sessions of which nothing is left."""

    def check_integrity(self, num_live: int) -> None:
        """Raise `InvariantViolation` when the transfers that live are not those that have not ended."""
        ended = self.done + self.failed + self.cancelled + self.expired + self.abandoned
        if self.accepted != ended + num_live:
            raise InvariantViolation(f"{self.accepted} accepted, {ended} ended and {num_live} live")
