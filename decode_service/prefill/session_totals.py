"""What a session with a prefill service counts and no outcome shows; summed over its sessions, a peer's."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from decode_service.prefill.peer_session import PeerSession


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """Counts from the begin of a session to its end; they only grow."""

    late_events: int = 0
    """Came after the outcome of their transfer was decided."""

    unknown_messages: int = 0
    """Named no transfer of their session."""

    duplicate_spans: int = 0
    """Exact repetitions."""

    clock_errors: int = 0
    """Complete transfers whose producer told times that cannot be true."""

    def __add__(self, other: SessionTotals) -> SessionTotals:
        return SessionTotals(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def totals_of(session: PeerSession) -> SessionTotals:
    """Return the counts of a session so far."""
    counts = session.statistics()
    return SessionTotals(
        late_events=counts.late_events,
        unknown_messages=counts.unknown_messages,
        duplicate_spans=counts.duplicates,
        clock_errors=session.transfers.num_clock_errors,
    )
