"""What the producer says of each live transfer, held against what decode does with it.

Theory of operation: decode opens a record when it starts a transfer and drops it when the transfer has
drained or its own life is over; prefill fills it. So there are as many records as transfers are live, and a
transfer of which only one side kept a journal is not compared.

Ownership: one per audit, shared by all lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.kv.ranges import Range

Key = tuple[str, str, int, int]
"""Boot id of decode, name of the slab, transfer, attempt."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Everything that both sides say of a span."""

    slot: int
    generation: int
    group: int
    layers: Range
    tokens: Range
    extent: Range
    digest: str


@dataclass(slots=True)
class SealedTransfer:
    """One transfer as its producer seals it."""

    slot: tuple[int, int, Range]
    """Id, generation and extent of the slot that decode leased."""

    spans: dict[int, Descriptor] = field(default_factory=dict)
    """By sequence number."""

    is_accepted: bool = False
    is_drained: bool = False
    verdict: str = ""
    """The terminal message; empty until it was sent."""


class SealBook:
    """Records of the transfers that are live at decode."""

    def __init__(self) -> None:
        self._transfers: dict[Key, SealedTransfer] = {}
        self._prefill_boots: set[str] = set()
        # Invariant: every prefill life that was seen, over or not: its last messages may still arrive.

    def __len__(self) -> int:
        return len(self._transfers)

    def prefill_started(self, boot: str) -> None:
        """A life of a prefill service is in the journals."""
        self._prefill_boots.add(boot)

    def is_kept(self, prefill_boot: str) -> bool:
        """Tell whether the journal of this prefill life is among those audited."""
        return prefill_boot in self._prefill_boots

    def start(self, key: Key, slot: tuple[int, int, Range]) -> None:
        """Decode starts a transfer."""
        self._transfers[key] = SealedTransfer(slot)

    def find(self, key: Key) -> SealedTransfer | None:
        """Return the record of a transfer that is live at decode."""
        return self._transfers.get(key)

    def drop(self, key: Key) -> None:
        """The transfer has drained at decode."""
        self._transfers.pop(key, None)

    def drop_life(self, decode_boot: str) -> None:
        """A life of decode is over."""
        self._transfers = {key: sealed for key, sealed in self._transfers.items() if key[0] != decode_boot}
