"""Where a transfer can be on the decode side, and what may happen to it there.

Theory of operation: `TRANSITIONS` is the whole rule; an event it does not list for a state is illegal.

    RESERVED --start--> REQUESTED --accepted--> STREAMING --done--> ENDING --imported--> COMPLETE
        |                   |                     | span                |                   | publish
        +------ abort ------+---------------------+------ abort --------+--- abort ---> PUBLISHED
                                  v
                              ABORTING --drained--> ENDED

Not here: what a transfer does on its way (`decode_transfer.py`).
"""

from __future__ import annotations

import enum

from common.errors import LocalProtocolError


class TransferState(enum.Enum):
    """Where a transfer is."""

    RESERVED = "reserved"
    """Pages and slot are held; nothing was sent."""

    REQUESTED = "requested"
    STREAMING = "streaming"
    ENDING = "ending"
    """The producer is done; copies are still under way."""

    COMPLETE = "complete"
    """All bytes are in their pages and checked; not yet readable."""

    PUBLISHED = "published"
    ABORTING = "aborting"
    """Failed or given up; bytes may still move."""

    ENDED = "ended"


class TransferEvent(enum.Enum):
    """What can happen to a transfer."""

    START = "start"
    ACCEPTED = "accepted"
    SPAN = "span"
    DONE = "done"
    IMPORTED = "imported"
    PUBLISH = "publish"
    ABORT = "abort"
    DRAINED = "drained"


_S, _E = TransferState, TransferEvent
TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    # The producer's part. A span before the acceptance is illegal: a producer that refuses has none.
    (_S.RESERVED, _E.START): _S.REQUESTED,
    (_S.REQUESTED, _E.ACCEPTED): _S.STREAMING,
    (_S.STREAMING, _E.SPAN): _S.STREAMING,
    (_S.STREAMING, _E.DONE): _S.ENDING,
    # Ours. COMPLETE and PUBLISHED differ, as a client may leave between the last copy and publication.
    (_S.ENDING, _E.IMPORTED): _S.COMPLETE,
    (_S.COMPLETE, _E.PUBLISH): _S.PUBLISHED,
    # Before Done either side can end it badly; ABORTING lasts until no byte moves (rule 4).
    (_S.RESERVED, _E.ABORT): _S.ABORTING,
    (_S.REQUESTED, _E.ABORT): _S.ABORTING,
    (_S.STREAMING, _E.ABORT): _S.ABORTING,
    # After Done only this side can abort: its client goes, or a digest does not match.
    (_S.ENDING, _E.ABORT): _S.ABORTING,
    (_S.COMPLETE, _E.ABORT): _S.ABORTING,
    (_S.ABORTING, _E.DRAINED): _S.ENDED,
}

TERMINAL = frozenset({_S.PUBLISHED, _S.ENDED})

OVER = TERMINAL | {_S.ABORTING}
"""States in which the outcome is decided and later events only count."""

END_ACCEPTED = frozenset({_S.ENDING, _S.COMPLETE})
"""States in which nothing of the peer is needed: its Done was accepted, local copies are the rest."""

BEYOND_PEER = OVER | END_ACCEPTED
"""States in which neither words nor the loss of the peer change how a transfer ends, only when it drains."""


def following(state: TransferState, event: TransferEvent) -> TransferState:
    """Return the state after an event; raises `LocalProtocolError` when the table does not list it."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise LocalProtocolError("illegal transfer event", state=state.value, event=event.value)
    return after
