"""The bytes of a slot smaller than its prompt's KV: which are being filled, which are sealed, which are free.

Theory of operation: every group has its share of the slot (`common/kv/ring.py`). A span goes

    free --open--> open (one per group) --seal--> sealed --release--> free

and `open` waits until its share has room. Only decode's `ReleaseSpan` makes room, and the one engine serves
all sessions, so all waits of a job together have one bound: `wait_s`, longer in proportion to the bytes that
came back. A bound for each span would let a decode that gives one back just before it hold the engine for as
long as the job has spans. While another session waits for the engine there is a second, shorter bound: waits
that the bytes since then have not made up for may reach CONTESTED_WAIT_S. An engine cannot be left and
entered again, so such a job does not pause: it fails, and may be asked for again. At a bound, or when the job
is stopped, the wait ends: an error, never a drop, never a wait for ever (rule 9). Bytes of a sealed span are
given to nobody before its release (rule 5).

Ownership: one per job whose slot is a ring. `open` and `sealed` are called on the engine's thread, `release`
and `wake` on the event loop; one lock protects everything, and is never held while bytes are copied.
Not here: which releases are credible (`common/session/prefill_side.py`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from common.errors import Cancelled, InvariantViolation, LeaseExpired
from common.kv.plan import PlannedSpan
from common.kv.ranges import Range
from common.kv.spans import PART_ALIGNMENT
from common.runtime.clock import Clock
from common.slab.allocator import Slot, SlotAllocator

BYTES_PER_WAIT = 2 << 30
"""Bytes that came back for which a job may wait as long again, so that the bound suits prompts of any size:
with the default of 30 s a decode may copy as slowly as 70 MB/s, far below what a copy with a digest does."""

CONTESTED_WAIT_S = 1.0
"""Seconds that a job may keep the engine waiting while another session waits for it. Decode gives a span back
within milliseconds, but copies them one after another: a whole slab of 256 MiB lies before the last, a decode
step or two between them, on cores that compute. That is a few tenths of a second; a decode that needs longer
has stopped, for the others too."""


@dataclass(frozen=True, slots=True)
class CreditTerms:
    """How long a job may wait for credit, and what ends the wait early."""

    wait_s: float
    """Longest wait of the job, all its spans together; as much again for each `BYTES_PER_WAIT` released."""

    stop: threading.Event
    """The job's; whoever sets it calls `CreditRing.wake`."""

    clock: Clock
    contested: threading.Event = field(default_factory=threading.Event)
    """The job's, set while another session waits for the engine; whoever changes it calls `wake`."""


@dataclass(frozen=True, slots=True)
class CreditStatistics:
    """How a ring is used now."""

    held_bytes: int
    """Of spans that are being filled, and of those sealed and not released."""

    num_waits: int
    """Spans that found no room at first, since the start."""

    waited_ns: int
    """What those waits took, all together."""

    waiting_since_ns: int | None
    """When the present wait began; None while there is none."""


class CreditRing:
    """Gives the spans of one job their bytes."""

    def __init__(self, shares: tuple[Range, ...], terms: CreditTerms) -> None:
        """Start with everything free; `shares` has the bytes of each group, from the start of the slot."""
        self._terms = terms
        self._changed = threading.Condition()
        # Invariant: everything below is read and written under _changed only.
        self._shares = tuple(SlotAllocator(share, PART_ALIGNMENT) for share in shares)
        self._open: dict[int, Slot] = {}
        # Invariant: keys are group indices; the span of the group that is being filled.
        self._sealed: dict[int, tuple[int, Slot]] = {}
        # Invariant: group and bytes, by sequence, of each span sealed and not released.
        self._num_waits = 0
        self._waited_ns = 0
        # Invariant: what all waits took, the present one up to its last look at the clock.
        self._owed_ns = 0
        # Invariant: in [0, _waited_ns]; waits that the bytes that came back since have not made up for.
        self._released_bytes = 0
        self._waiting_since_ns: int | None = None
        # Invariant: set exactly while `open` waits.

    def open(self, planned: PlannedSpan) -> int:
        """Return where the span may be filled, in bytes from the start of the slot; waits for room.

        Raises: `LeaseExpired` when no room came before the job's waits had reached their bound, `Cancelled`
        when the job was stopped while it waited; no bytes were given.
        """
        share = self._shares[planned.group_index]
        with self._changed:
            if planned.group_index in self._open:
                raise InvariantViolation(f"group {planned.group_index} has a span that is not sealed")
            if not share.can_lease(planned.length):
                self._num_waits += 1
                self._wait_for_room(share, planned)
            slot = share.lease(planned.length)
            self._open[planned.group_index] = slot
            return slot.offset

    def sealed(self, sequence: int, planned: PlannedSpan) -> None:
        """The open span of a group is final; call it before anybody can hear of the span."""
        with self._changed:
            self._sealed[sequence] = (planned.group_index, self._open.pop(planned.group_index))

    def release(self, sequence: int) -> None:
        """Take the bytes of a sealed span back, and wake whoever waits for room.

        Raises: `InvariantViolation` when no such span is sealed and not released; nothing changed.
        """
        with self._changed:
            if sequence not in self._sealed:
                raise InvariantViolation(f"span {sequence} is not sealed or is released already")
            group_index, slot = self._sealed.pop(sequence)
            self._released_bytes += len(slot.extent)
            self._owed_ns = max(0, self._owed_ns - self._earned_ns(len(slot.extent)))
            self._shares[group_index].release(slot)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a waiting `open` look at its job's stop again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_waiting(self) -> bool:
        """Whether `open` waits for room now; true or false a moment later, unless on the engine's thread."""
        return self._waiting_since_ns is not None

    def statistics(self) -> CreditStatistics:
        """Return how the ring is used now."""
        with self._changed:
            held_bytes = sum(share.statistics().leased_bytes for share in self._shares)
            return CreditStatistics(held_bytes, self._num_waits, self._waited_ns, self._waiting_since_ns)

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when shares and spans disagree."""
        with self._changed:
            for group_index, share in enumerate(self._shares):
                share.check_integrity()
                sealed = sum(group == group_index for group, _ in self._sealed.values())
                leased = share.statistics().num_leased
                if leased != sealed + (group_index in self._open):
                    raise InvariantViolation(
                        f"group {group_index} leases {leased} spans, {sealed} are sealed"
                    )
            if not 0 <= self._owed_ns <= self._waited_ns:
                raise InvariantViolation(f"{self._owed_ns} ns are owed of {self._waited_ns} ns waited")

    def _wait_for_room(self, share: SlotAllocator, planned: PlannedSpan) -> None:
        """Return once the share has room for the span; the lock is held before and after."""
        terms = self._terms
        last_ns = self._waiting_since_ns = terms.clock.now_ns()
        try:
            while True:
                now_ns = terms.clock.now_ns()
                self._waited_ns += now_ns - last_ns
                self._owed_ns += now_ns - last_ns
                last_ns = now_ns
                if share.can_lease(planned.length):
                    return
                if terms.stop.is_set():
                    raise Cancelled("stopped while waiting for credit")
                # A wait that is contested late has often reached the shorter bound already, and ends at once.
                left_ns = self._left_ns()
                if left_ns <= 0:
                    raise LeaseExpired(self._problem(planned))
                self._changed.wait(left_ns / 1e9)
        finally:
            self._waiting_since_ns = None

    def _left_ns(self) -> int:
        """Return how long the wait may go on, at most 0 when it is over."""
        left_ns = self._bound_ns() - self._waited_ns
        contested_ns = round(CONTESTED_WAIT_S * 1e9) - self._owed_ns
        return min(left_ns, contested_ns) if self._terms.contested.is_set() else left_ns

    def _bound_ns(self) -> int:
        """Return how long the job may wait in all, by what came back so far."""
        return round(self._terms.wait_s * 1e9) + self._earned_ns(self._released_bytes)

    def _earned_ns(self, num_bytes: int) -> int:
        """Return how much longer a job may wait when so many bytes come back."""
        return round(self._terms.wait_s * num_bytes / BYTES_PER_WAIT * 1e9)

    def _problem(self, planned: PlannedSpan) -> str:
        group = planned.group_index
        sealed = sum(sealed_group == group for sealed_group, _ in self._sealed.values())
        wanted = f"{planned.length} bytes of group {group}"
        bound = f"{self._bound_ns() / 1e9:g} s"
        if self._waited_ns < self._bound_ns():
            bound = f"{CONTESTED_WAIT_S:g} s while another session waits for the engine"
        return f"no credit for {wanted} within {bound} ({sealed} spans sealed and not released)"
