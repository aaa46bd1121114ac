"""What one request holds, and when it may be given back.

Theory of operation: a reservation has *holders*, the parties that may still read or write its pages. It is
free when the last holder has dropped it, whatever order cancel, failure and success take (rule 4):

    CLIENT     the call that asked for it, until publication, or its end before that
    PRODUCER   a prefill service (until it has drained) and the importer (until its copies ended)
    ENGINE     the local prefill engine
    LANE       the step loop, from publication until the sequence is retired

Ownership: made by `Admission`, which gets it back through `on_free`; event loop only.
Not here: what makes it readable (`decode_service/publication.py`, the only caller of `mark_published`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from common.errors import InvariantViolation
from decode_service.cache.sequence_pages import SequencePages


class Holder(enum.Enum):
    """A party that may still touch the pages of a reservation."""

    CLIENT = "client"
    PRODUCER = "producer"
    ENGINE = "engine"
    LANE = "lane"


class ReservationState(enum.Enum):
    """Whether the pages are readable."""

    RESERVED = "reserved"
    """Written, perhaps, and not readable."""

    PUBLISHED = "published"
    FREE = "free"
    """Given back; the object is of no more use."""


class Reservation:
    """Pages of every group and a lane, held for one request."""

    def __init__(self, pages: SequencePages, on_free: Callable[[Reservation], None]) -> None:
        self._pages = pages
        self._on_free = on_free
        self._state = ReservationState.RESERVED
        self._holders = {Holder.CLIENT}
        # Invariant: empty exactly when the state is FREE.

    @property
    def pages(self) -> SequencePages:
        """The pages, by group."""
        return self._pages

    @property
    def state(self) -> ReservationState:
        """Whether the pages are readable."""
        return self._state

    @property
    def holders(self) -> frozenset[Holder]:
        """Who may still touch the pages."""
        return frozenset(self._holders)

    def hold(self, holder: Holder) -> None:
        """Add a holder.

        Raises: `InvariantViolation` when the reservation is free or the holder holds it already.
        """
        if self._state is ReservationState.FREE or holder in self._holders:
            raise InvariantViolation(f"{holder.value} cannot hold a reservation that is {self._describe()}")
        self._holders.add(holder)

    def drop(self, holder: Holder) -> None:
        """Remove a holder; the last one frees the pages.

        Raises: `InvariantViolation` when it did not hold the reservation.
        """
        if holder not in self._holders:
            raise InvariantViolation(f"{holder.value} does not hold a reservation that is {self._describe()}")
        self._holders.remove(holder)
        if not self._holders:
            self._state = ReservationState.FREE
            self._on_free(self)

    def mark_published(self) -> None:
        """Make the pages readable; called by `publication.publish` alone."""
        if self._state is not ReservationState.RESERVED:
            raise InvariantViolation(f"cannot publish a reservation that is {self._describe()}")
        self._state = ReservationState.PUBLISHED

    def _describe(self) -> str:
        return f"{self._state.value}, held by {sorted(holder.value for holder in self._holders)}"
