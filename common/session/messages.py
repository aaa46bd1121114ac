"""The messages of a session, free of any wire format.

Theory of operation: one frozen dataclass per message of `protos/kvspan/v1/transfer.proto`.
`common/wire/convert.py` maps both ways; the machines in this package see only these. The order in which
they may be sent is in `decode_side.py` and `prefill_side.py`, and in docs/protocol.md.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from common.kv.digest import DigestKind
from common.kv.plan import SpanGranularity
from common.kv.ranges import Range
from common.kv.spans import Span
from common.session.identity import EngineFacts, NumericsPolicy, PeerIdentity

LONGEST_STEP_S = 600.0
"""Seconds that an engine may say it cannot be stopped within; nobody waits longer for it."""


def step_limit_s(longest_step_ms: int) -> float:
    """Return how much longer whoever waits for an engine has to wait, by what it says of itself."""
    return min(longest_step_ms / 1e3, LONGEST_STEP_S)


class TransferMode(enum.Enum):
    """When a span is written and sealed; everything else is the same code."""

    STREAM = "stream"
    """Written and sealed as soon as its layers are done."""

    DEFERRED = "deferred"
    """Written when done, all sealed at the end: isolates notification from export."""

    WHOLE = "whole"
    """All written and sealed at the end."""


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Protocol versions a side speaks, both ends included."""

    minimum: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.minimum}..{self.maximum}"


@dataclass(frozen=True, slots=True)
class SlabHandle:
    """How the slab of a session is had."""

    name: str
    """Of its socket in the slab directory, which each side may mount elsewhere, and of the slab in logs."""

    size_bytes: int
    """Length of the memory, header included."""

    layout: str
    """Name of the byte layout inside a span."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session: who decode is and how its slab is had."""

    versions: VersionRange
    boot_id: str
    identity: PeerIdentity
    modes: tuple[TransferMode, ...]
    digests: tuple[DigestKind, ...]
    """In order of preference."""

    slab: SlabHandle
    numerics_policy: NumericsPolicy = NumericsPolicy.EXACT


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Ask for the KV of one prompt in one slot."""

    transfer_id: int
    attempt: int
    slot_id: int
    generation: int
    slot_offset: int
    """First byte of the slot, from the start of the slab."""

    slot_size: int
    token_ids: tuple[int, ...]
    first_tokens: tuple[int, ...]
    """By group of decode's geometry the first position that is wanted; the prompt's length when none is."""

    mode: TransferMode
    time_limit_s: float
    """Seconds from receipt after which the producer gives up; a duration, since clocks are not shared."""

    request_id: str
    """For logs and timelines only; never a key."""

    @property
    def required(self) -> tuple[Range, ...]:
        """Return, per group, the positions that are wanted."""
        return tuple(Range(first, len(self.token_ids)) for first in self.first_tokens)


@dataclass(frozen=True, slots=True)
class ReleaseSpan:
    """Give the bytes of one sealed span back to the producer (credit)."""

    transfer_id: int
    attempt: int
    sequence: int


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """Ask the producer to stop one transfer; it answers with a terminal message once drained."""

    transfer_id: int
    attempt: int
    cause: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask for a sign of life."""

    number: int
    """Counts the pings of the session, from 1."""


DecodeMessage = Hello | StartPrefill | ReleaseSpan | CancelPrefill | Ping


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello: who prefill is, what was chosen, and the nonce it read from the slab."""

    version: int
    boot_id: str
    identity: PeerIdentity
    modes: tuple[TransferMode, ...]
    digest: DigestKind
    granularity: SpanGranularity
    max_prompt_tokens: int
    max_concurrency: int
    """Transfers that may be started and not ended at one time."""

    engine: EngineFacts
    nonce: bytes
    longest_step_ms: int = 0
    """Longest time the engine cannot be stopped within; 0 when it looks for a stop at every layer."""


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    """The transfer is queued for the engine."""

    transfer_id: int
    attempt: int
    queue_position: int
    """Transfers that run before it."""


@dataclass(frozen=True, slots=True)
class SpanSealed:
    """A span is final in the slab and may be imported (KVSpan on the wire)."""

    span: Span


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """What the producer sealed for one group over the whole transfer."""

    group_index: int
    num_spans: int
    num_bytes: int
    layer_tokens: int
    """Sum over spans of layers x tokens."""


@dataclass(frozen=True, slots=True)
class SourceTimings:
    """When the producer did what, CLOCK_MONOTONIC nanoseconds of the shared kernel."""

    accepted_ns: int
    started_ns: int
    ended_ns: int
    """The last layer of the last chunk and the logits were done."""


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Terminal: everything was sealed; the producer writes no more."""

    transfer_id: int
    attempt: int
    generation: int
    totals: tuple[GroupTotals, ...]
    logits: bytes = field(repr=False)
    """float32 little endian, one value per vocabulary entry, of the last prompt position."""

    timings: SourceTimings


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Terminal: the producer failed and has drained."""

    transfer_id: int
    attempt: int
    reason: str
    """UPPER_SNAKE code of the error."""

    message: str


@dataclass(frozen=True, slots=True)
class PrefillCancelled:
    """Terminal: the producer stopped on request and has drained."""

    transfer_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to a Ping."""

    number: int


@dataclass(frozen=True, slots=True)
class GoAway:
    """Nothing more is started; decode half-closes the stream once every transfer has its terminal message."""

    cause: str


PrefillMessage = (
    Welcome | PrefillAccepted | SpanSealed | PrefillDone | PrefillFailed | PrefillCancelled | Pong | GoAway
)
