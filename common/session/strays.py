"""How much of what a peer says may mean nothing before its session is cut off.

Theory of operation: messages cross. A cancel may name a transfer that has just ended, and the release of a
span one whose end is on its way. So what means nothing is ignored; but an honest peer causes only so much:

    strays <= MAX_STRAYS + what may cross of the transfers and spans that there were

Both sides count by this rule. The message after the one that passes the bound ends the session, so that what
was decided before is carried out, and all of it.

Ownership: one per session, owned by its machine. Not here: what is a stray (`prefill_side.py`,
`decode_side.py`, `decode_transfer.py`).
"""

from __future__ import annotations

from common.errors import RemoteProtocolError

MAX_STRAYS = 1000
"""Strays of one session beside what may cross. An honest peer causes next to none, and so many cost less
than a second."""

FAULT_STRAYS = 200
"""Of a transfer that a wrong span, digest or end has failed: each costs a client its request, so that few of
them end the session, and prompts are computed elsewhere."""


TOKENS_PER_STRAY = 1000
"""A start that is refused or repeated counts once more for so many tokens: they had to be read."""


class Strays:
    """Counts them, and what may cross."""

    def __init__(self) -> None:
        self._count = 0
        self._allowed = MAX_STRAYS

    def allow(self) -> None:
        """One more message may cross what we say."""
        self._allowed += 1

    def note(self, count: int = 1) -> None:
        """Count what meant nothing."""
        self._count += count

    def require_few(self) -> None:
        """Raise `RemoteProtocolError` when there were more than an honest peer can cause."""
        if self._count > self._allowed:
            raise RemoteProtocolError(f"{self._count} strays, at most {self._allowed} may come")
