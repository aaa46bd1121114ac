"""How the producer of one transfer ended: whether it may still write, and what it handed over.

Theory of operation: "may it still write?" (rule 4) and "how did the transfer end?" (rule 6) are two
questions. Any terminal message answers the first, also one that fails the transfer; only an accepted
`PrefillDone` brings logits and times.

Ownership: one object per transfer, owned by `DecodeTransfer`.
Not here: when an end is accepted (`decode_transfer.py`).
"""

from __future__ import annotations

import numpy as np

from common.errors import (
    EngineFailed,
    KVSpanError,
    LeaseExpired,
    LogitsInvalid,
    PeerUnavailable,
    PrefillEngineFailed,
    PrefillFailed,
    ShuttingDown,
)
from common.session.messages import PrefillDone


class ProducerEnd:
    """What is known of a producer's end."""

    def __init__(self) -> None:
        self._may_write = False
        # Invariant: True from sending StartPrefill until a terminal message or the loss of the peer.
        self._done: PrefillDone | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the producer writes no more, so that nothing need be said to it."""
        return not self._may_write

    @property
    def done(self) -> PrefillDone:
        """The end that was accepted; only after that."""
        assert self._done is not None
        return self._done

    def begin(self) -> None:
        """The producer was asked: from here on it may write."""
        self._may_write = True

    def end(self) -> None:
        """The producer writes no more, or into memory that nobody reads."""
        self._may_write = False

    def accept(self, done: PrefillDone) -> None:
        """Keep the end that stands."""
        self._done = done


def require_logits(logits: bytes, vocab_size: int) -> None:
    """Raise `LogitsInvalid` unless there is one finite float32 per entry of the vocabulary."""
    if len(logits) != 4 * vocab_size:
        raise LogitsInvalid(f"{len(logits)} bytes, expected {4 * vocab_size}")
    if not np.isfinite(np.frombuffer(logits, dtype="<f4")).all():
        raise LogitsInvalid("a value is not finite")


def remote_error(reason: str, text: str) -> KVSpanError:
    """Return what a producer's failure means here: what another producer may do better has its own class."""
    if reason == LeaseExpired.code:
        return LeaseExpired(text)
    if reason == ShuttingDown.code:
        return PeerUnavailable(text)
    if reason == EngineFailed.code:
        return PrefillEngineFailed(text)
    return PrefillFailed(reason, text)
