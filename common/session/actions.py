"""What a session machine asks its adapter to do.

Theory of operation: machines never touch a stream, a thread or memory; each call returns actions in the
order in which they must be carried out. The adapters are `decode_service/prefill/peer_session.py` and
`prefill_service/servicer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import KVSpanError
from common.kv.spans import Span
from common.session.messages import DecodeMessage, PrefillMessage, SlabHandle, StartPrefill


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the stream."""

    message: DecodeMessage | PrefillMessage


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Transfers may start; the slab need not be handed over any more, since the peer has mapped it."""


@dataclass(frozen=True, slots=True)
class ImportSpan:
    """Check the digest and copy the span into its reserved pages; report the end of the copy."""

    span: Span


@dataclass(frozen=True, slots=True)
class TransferComplete:
    """Everything rule 2 asks for has happened; the reservation may be published."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer has its first terminal event; nothing will be published. Bytes may still move."""

    transfer_id: int
    error: KVSpanError


@dataclass(frozen=True, slots=True)
class TransferDrained:
    """No byte of this transfer moves any more: its slot and, unless published, its pages may be reused."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class SessionLeaving:
    """The peer shuts down: no transfer may start in this session; those that run go on."""

    error: KVSpanError


@dataclass(frozen=True, slots=True)
class HalfClose:
    """Nothing more will be said: end our direction of the stream, so that the peer can end the other."""


@dataclass(frozen=True, slots=True)
class SlabIdle:
    """The session is closed and no copy out of (or into) its slab is under way: unmap it."""


DecodeAction = (
    Send
    | SessionOpened
    | ImportSpan
    | TransferComplete
    | TransferFailed
    | TransferDrained
    | SessionLeaving
    | HalfClose
    | SlabIdle
)


@dataclass(frozen=True, slots=True)
class AttachSlab:
    """Map the slab and report `attached(nonce)`; when it cannot be mapped, close with `SlabNotShared`."""

    handle: SlabHandle


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Queue the job for the engine."""

    job: StartPrefill


@dataclass(frozen=True, slots=True)
class Dequeue:
    """Take a job that has not started out of the queue."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Make the engine give the running job up at its next layer, or while it waits for credit."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class ReturnCredit:
    """Let the job use the bytes of one of its sealed spans again."""

    transfer_id: int
    sequence: int


PrefillAction = Send | AttachSlab | Enqueue | Dequeue | StopEngine | ReturnCredit | SlabIdle
