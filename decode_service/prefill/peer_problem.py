"""Why there is no session with a prefill service, and what of it each reader is told.

Theory of operation: a problem is known again by its reason and its differences. Its text is for whoever runs
the services: it may name addresses and paths, and may differ from try to try. Clients get the reasons and
the differences, which hold nothing of the host (`common/session/negotiation.py`).

Not here: when a session is tried again (`prefill_client.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import (
    Difference,
    KVSpanError,
    NegotiationError,
    PeerLost,
    PeerUnavailable,
    RequestError,
    ShuttingDown,
)
from common.excerpt import printable
from common.runtime.address import UnixAddress, parse_address
from common.wire.failure import RemoteFailure

MAX_REASON_CHARS = 63
"""Of a reason that a peer chose."""

MAX_TEXT_CHARS = 32 << 10
"""Of the text of a problem: forty differences in full."""

MAX_DIFFERENCES = 200
"""Of one problem; a peer chooses how many there are, and all of them travel in one status."""


@dataclass(frozen=True, slots=True)
class PeerProblem:
    """One problem; equal ones need not be logged twice."""

    reason: str
    """UPPER_SNAKE code of the error, or of the status when the library made it."""

    text: str = field(compare=False)
    differences: tuple[Difference, ...] = ()
    """What the two services disagree on, when they do not fit."""

    @property
    def told_to_clients(self) -> str:
        """The part of it that names nothing of the host."""
        return f"{self.reason}: {self.text}" if self.differences else self.reason


NOT_CONNECTED = PeerProblem(PeerUnavailable.code, "not connected yet")
FINISHING = PeerProblem(PeerLost.code, "a prompt did not drain in time, so another session is opened")
LEAVING = PeerProblem(ShuttingDown.code, "it is shutting down")


def problem_of(error: KVSpanError | RemoteFailure) -> PeerProblem:
    """Return what an error that ended a session, or kept one from opening, says."""
    if isinstance(error, RemoteFailure):
        reason = printable(error.reason or error.code.name, MAX_REASON_CHARS)
        return PeerProblem(reason, printable(str(error), MAX_TEXT_CHARS))
    differences = error.differences if isinstance(error, NegotiationError) else ()
    text = printable(str(error), MAX_TEXT_CHARS)
    return PeerProblem(error.code, text, tuple(map(_shown, differences[:MAX_DIFFERENCES])))


def silence_of(target: str) -> str:
    """Return what can be said of a prefill service that does not answer at an address."""
    address = parse_address("prefill", target)
    if isinstance(address, UnixAddress) and address.path.exists() and not os.access(address.path, os.W_OK):
        owner = address.path.stat().st_uid
        return f"its socket belongs to uid {owner}, this is uid {os.geteuid()}; run both as one user"
    return "it does not answer"


def unavailable(problems: Iterable[PeerProblem], refusal: RequestError | None = None) -> PeerUnavailable:
    """Return what a client is told that finds no session: the problem of every peer, each once.

    `refusal` is why a session that there is can never take its prompt.
    """
    distinct = list(dict.fromkeys(problems))
    told = "; ".join(one.told_to_clients for one in distinct) or "none is configured"
    which, but = (" that could take it", f"; the one that is: {refusal}") if refusal else ("", "")
    return PeerUnavailable(
        f"no prefill service{which} is connected ({told}{but})",
        cause=", ".join(dict.fromkeys(one.reason for one in distinct)),
        differences=[difference for one in distinct for difference in one.differences],
    )


def _shown(difference: Difference) -> Difference:
    return Difference(
        printable(difference.field), printable(difference.decode_value), printable(difference.prefill_value)
    )
