"""The one place where a reservation becomes readable.

Theory of operation (rule 2): `publish` is called on the event loop with a prefill that claims to be whole.
It asks the claimant to prove it, in the same turn of the loop in which it marks the pages readable, so that
no cancel, no loss of the peer and no late message can come between proof and publication. The step loop
sees the sequence only between two steps, because it takes new ones only there.

What a proof must cover: complete coverage of every KV-owning layer and required position, every digest
matched, the last copy ended, the producer's own end with agreeing totals. `RemotePrefill` proves it by the
state of its transfer, `LocalPrefill` by the rows its writer has placed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.engine.prefill import Logits
from decode_service.cache.reservation import Holder, Reservation
from decode_service.generate.answer import Answer
from decode_service.generate.sequence import Sequence


class FinishedPrefill(Protocol):
    """A prompt whose KV is said to be in the reserved pages."""

    def prove_complete(self) -> Logits:
        """Return the logits [vocabulary] of the last position.

        Raises: the error that ended the prefill, or `InvariantViolation`, unless all of rule 2 holds now.
        """

    def settle(self) -> None:
        """Record that the pages were published; slab bytes may be reused."""


def publish(
    reservation: Reservation,
    prefill: FinishedPrefill,
    answer: Answer,
    prompt_len: int,
    on_published: Callable[[Reservation], None] = lambda _: None,
) -> Sequence:
    """Make the pages of a reservation readable and return the sequence that reads them.

    From here on the step loop holds the reservation, and not the call, whose client may read slowly; the
    caller hands the sequence over. `on_published` is told
    before anything of the prefill may be reused.

    Raises: what `prove_complete` raises; then nothing was visible.
    """
    # The proof comes first, and nothing below it waits: no other turn of the loop can come in between.
    logits_V = prefill.prove_complete()
    reservation.mark_published()
    # LANE before CLIENT is dropped: with no holder in between the pages would be free (rule 4).
    reservation.hold(Holder.LANE)
    # The record before the release: an auditor sees no byte used again whose publication it has not seen.
    on_published(reservation)
    prefill.settle()
    reservation.drop(Holder.CLIENT)
    return Sequence(reservation, answer, prompt_len, logits_V)
