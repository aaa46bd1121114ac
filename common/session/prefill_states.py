"""The states of a session as the prefill service sees it, and the table of its events.

Theory of operation: `PREFILL_SESSION_TRANSITIONS` is the whole rule; an event it does not list for a state is
illegal.

    WAITING --hello--> ATTACHING --attached--> OPEN --leave--> LEAVING --close--> CLOSED
       +----- close -------+------- close -------+---------- close ------------------->

Not here: what an event means for the jobs of the session (`prefill_side.py`).
"""

from __future__ import annotations

import enum


class PrefillState(enum.Enum):
    """Where the session is."""

    WAITING = "waiting"
    """For Hello."""

    ATTACHING = "attaching"
    """Hello fits; the slab is being mapped."""

    OPEN = "open"
    LEAVING = "leaving"
    """GoAway was said: what is started is refused; live jobs go on."""

    CLOSED = "closed"


class PrefillEvent(enum.Enum):
    """What can happen to a session as a whole."""

    HELLO = "hello"
    ATTACHED = "attached"
    LEAVE = "leave"
    CLOSE = "close"


_S, _E = PrefillState, PrefillEvent
PREFILL_SESSION_TRANSITIONS: dict[tuple[PrefillState, PrefillEvent], PrefillState] = {
    (_S.WAITING, _E.HELLO): _S.ATTACHING,
    (_S.ATTACHING, _E.ATTACHED): _S.OPEN,
    (_S.OPEN, _E.LEAVE): _S.LEAVING,
    (_S.WAITING, _E.CLOSE): _S.CLOSED,
    (_S.ATTACHING, _E.CLOSE): _S.CLOSED,
    (_S.OPEN, _E.CLOSE): _S.CLOSED,
    (_S.LEAVING, _E.CLOSE): _S.CLOSED,
}

WELCOMED = frozenset({_S.OPEN, _S.LEAVING})
"""States in which the peer may speak of transfers."""
