"""When the next slab is worth making for a prefill service that did not take the last one.

Theory of operation: a slab is allocated and touched whole before anybody can refuse it. A life of the peer
that refused one hardly takes the next, so the pause doubles; what a restart mends is seen at once, since its
boot id is asked for before a slab is made.

Ownership: one per `PrefillPeer`. Event loop only.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import Difference, SlabNotShared
from common.runtime.clock import Clock

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""The longest one still tries again when another session has given its slab back."""


class SlabRefusals:
    """Remembers who refused a slab last, and why."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._boot_id = ""
        self._differences: Sequence[Difference] = ()
        # Not the error, which holds the frames that it went through, and with them a channel.
        self._pause_s = 0.0
        self._due_ns = 0

    def note(self, boot_id: str, outcome: object) -> None:
        """A session with that life of the peer, for which a slab was made, has ended."""
        if not isinstance(outcome, SlabNotShared):
            self._boot_id = ""
            return
        is_again = boot_id == self._boot_id
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if is_again else FIRST_PAUSE_S
        self._boot_id, self._differences = boot_id, outcome.differences
        self._due_ns = self._clock.now_ns() + round(self._pause_s * 1e9)

    def check(self, boot_id: str) -> None:
        """Raise `SlabNotShared` as that life of the peer did, unless a slab is worth making for it now."""
        if boot_id == self._boot_id and self._clock.now_ns() < self._due_ns:
            raise SlabNotShared(self._differences)
