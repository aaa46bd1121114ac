"""Every error kvspan raises on purpose, grouped by what the caller can do about it.

    KVSpanError                    base, never raised itself
      ConfigError                  fix the configuration; exit code 2
        UnsupportedModel           the model has layers kvspan cannot hand over
      NegotiationError             the two services do not fit; lists every difference
        VersionMismatch  ModelMismatch  GeometryMismatch  LayoutMismatch  SlabNotShared
      ProtocolError                a side broke the rules of the session
        LocalProtocolError         we would have
        RemoteProtocolError        the peer did
      CapacityError                full now; try again
        SlabExhausted  PagesExhausted  QueueFull  CallsExhausted
      TransferError                one transfer is lost, no other is touched
        StaleGeneration  SpanOutOfRange  SpanOverlap  ChecksumMismatch
        CoverageIncomplete  TotalsMismatch  LogitsInvalid  PrefillFailed
      PeerError                    the other service is gone or late; try again
        PeerLost  PeerUnavailable  PrefillEngineFailed  LeaseExpired  ShuttingDown
      RequestError                 the client must change the request
        InvalidRequest  PromptTooLong  UnknownModel  Cancelled  DeadlineExceeded
      EngineError                  the compute engine failed
        EngineFailed
    InvariantViolation             our bug; not a KVSpanError; stops the service

Theory of operation: every class is a dataclass of its facts, and `text` says them in a sentence; `metadata()`
gives the same facts as strings for a status detail. The mapping from class to gRPC
code is in `common/wire/status.py`, and an architecture test fails when a leaf has none.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, dataclass_transform

from common.excerpt import excerpt
from common.facts import Difference as Difference
from common.facts import Violation as Violation


class Blame(enum.Enum):
    """Which side has to change something."""

    LOCAL = "local"
    REMOTE = "remote"


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class KVSpanError(Exception):
    """Base of every error with a meaning for the caller; only leaves are raised."""

    code: ClassVar[str] = "KVSPAN_ERROR"
    """Stable machine-readable reason, UPPER_SNAKE, at most 63 characters."""

    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without any change."""

    blame: ClassVar[Blame] = Blame.LOCAL

    text: ClassVar[str] = ""
    """The message; names in braces are facts."""

    def __init_subclass__(cls, code: str) -> None:
        """Make a dataclass of the facts that a class below adds, with a `code` of its own."""
        cls.code = code
        dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        # A list may still change in the hands of whoever made it.
        vars(self).update({name: tuple(v) for name, v in vars(self).items() if isinstance(v, list)})

    def __str__(self) -> str:
        return self.text.format(code=self.code, **self._facts())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def metadata(self) -> dict[str, str]:
        """Return the typed facts of this error as strings, keyed by attribute name."""
        return {name: str(value) for name, value in self._facts().items()}

    def _facts(self) -> dict[str, object]:
        """Return the public attributes, those of several values as one text."""
        return {
            name: "; ".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if not name.startswith("_")
        }


class ConfigError(KVSpanError, code="CONFIG_INVALID"):
    """A flag or a file of this service is wrong; the process exits with code 2."""

    text = "{field}={value}: {problem}"
    field: str
    value: object
    problem: str


class UnsupportedModel(ConfigError, code="MODEL_UNSUPPORTED"):
    """The model has layers whose state kvspan cannot hand over; names them."""

    def __init__(self, model: str, layers: Sequence[str], problem: str) -> None:
        self.layers = tuple(layers)
        where = f" (layers: {', '.join(layers)})" if layers else ""
        super().__init__("model", model, problem + where)


class NegotiationError(KVSpanError, code="NEGOTIATION_FAILED"):
    """The two services cannot work together; carries every difference, not the first.

    The text shows as much as a person reads: a peer chose number and length of the values.
    """

    blame = Blame.REMOTE
    text = "peers do not fit: {differences}"

    max_shown: ClassVar[int] = 40
    """Differences in the text, which tells the number of the others."""

    differences: Sequence[Difference]

    def _facts(self) -> dict[str, object]:
        shown = [
            Difference(excerpt(one.field), excerpt(one.decode_value), excerpt(one.prefill_value))
            for one in self.differences[: self.max_shown]
        ]
        num_others = len(self.differences) - len(shown)
        others = f"; and {num_others} more" if num_others else ""
        return {"differences": "; ".join(map(str, shown)) + others}


class VersionMismatch(NegotiationError, code="PROTOCOL_VERSION_MISMATCH"):
    """No protocol version is spoken by both."""


class ModelMismatch(NegotiationError, code="MODEL_MISMATCH"):
    """A fingerprint of config, weights or tokenizer, or the numerics, differs."""


class GeometryMismatch(NegotiationError, code="KV_GEOMETRY_MISMATCH"):
    """The shape, dtype, group, window or page size of some layer differs."""


class LayoutMismatch(NegotiationError, code="SPAN_LAYOUT_MISMATCH"):
    """No span layout, transfer mode or digest kind is common to both."""


class SlabNotShared(NegotiationError, code="SLAB_NOT_SHARED"):
    """The prefill service does not see the memory that the decode service made."""


class ProtocolError(KVSpanError, code="PROTOCOL_VIOLATION"):
    """A message that the rules of the session do not allow in this state."""

    rule: str
    state: str = field(default="", kw_only=True)
    event: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        return self.rule + (f" (event {self.event} in state {self.state})" if self.event else "")


class LocalProtocolError(ProtocolError, code="PROTOCOL_VIOLATION_LOCAL"):
    """We asked our own machine for something the rules forbid; nothing was sent."""


class RemoteProtocolError(ProtocolError, code="PROTOCOL_VIOLATION_REMOTE"):
    """The peer sent something the rules forbid; the session ends."""

    blame = Blame.REMOTE


class CapacityError(KVSpanError, code="CAPACITY_EXHAUSTED"):
    """Full now; the same request may fit later."""

    retryable = True
    text = "{code}: {requested} {unit} requested, {free} free"
    requested: int
    free: int
    unit: str


class SlabExhausted(CapacityError, code="SLAB_EXHAUSTED"):
    """No gap in the slab is large enough for the slot."""

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(requested, free, "slab bytes")


class PagesExhausted(CapacityError, code="PAGES_EXHAUSTED"):
    """A group has too few free pages."""

    def __init__(self, group_index: int, requested: int, free: int) -> None:
        self.group_index = group_index
        super().__init__(requested, free, f"pages of group {group_index}")


class QueueFull(CapacityError, code="QUEUE_FULL"):
    """The bounded queue of waiting requests is full."""

    def __init__(self, limit: int) -> None:
        super().__init__(1, 0, f"places in the queue of {limit}")


class CallsExhausted(CapacityError, code="CALLS_EXHAUSTED"):
    """As many calls of a method are open as this service takes; nothing of this one was read."""


class TransferError(KVSpanError, code="TRANSFER_FAILED"):
    """One transfer failed and publishes nothing; its neighbours are untouched."""

    blame = Blame.REMOTE


class StaleGeneration(TransferError, code="STALE_GENERATION"):
    """A message names a slot lease, attempt or boot that is over."""

    text = "{field} is {actual}, current is {expected}"
    field: str
    expected: int
    actual: int


class SpanOutOfRange(TransferError, code="SPAN_OUT_OF_RANGE"):
    """A field of a span lies outside what this transfer may carry."""

    text = "span {field} is {actual}, allowed {allowed}"
    field: str
    actual: object
    allowed: object


class SpanOverlap(TransferError, code="SPAN_OVERLAP"):
    """A span covers a position that another span covered already."""

    text = "group {group_index} layer {layer_index}: tokens {tokens} overlap {placed} already placed"
    group_index: int
    layer_index: int
    tokens: str
    placed: str


class ChecksumMismatch(TransferError, code="KV_CHECKSUM"):
    """The bytes of a span do not have the digest it was told with."""

    text = "span {sequence}: digest {actual}, told {expected}"
    sequence: int
    expected: str
    actual: str


class CoverageIncomplete(TransferError, code="COVERAGE_INCOMPLETE"):
    """The producer ended while required positions were missing; lists group, layer and tokens."""

    text = "missing KV: {missing}"
    missing: Sequence[str]


class TotalsMismatch(TransferError, code="TOTALS_MISMATCH"):
    """The totals in PrefillDone disagree with what was told."""

    text = "{field}: producer says {told}, received {received}"
    field: str
    told: int
    received: int


class LogitsInvalid(TransferError, code="LOGITS_INVALID"):
    """The handed-over logits have a wrong length or a value that is not finite."""

    text = "logits: {problem}"
    problem: str


class PrefillFailed(TransferError, code="PREFILL_FAILED"):
    """The prefill service ended the transfer with an error of its own."""

    text = "prefill failed: {reason}: {message}"
    reason: str
    message: str


class PeerError(KVSpanError, code="PEER_ERROR"):
    """The other service is gone, late or leaving; the same call may succeed later."""

    retryable = True
    blame = Blame.REMOTE
    text = "{problem}"
    problem: str


class PeerLost(PeerError, code="PREFILL_PEER_LOST"):
    """The session to the prefill service ended while this request depended on it."""


class PeerUnavailable(PeerError, code="PREFILL_UNAVAILABLE"):
    """No prefill service is connected; says why of each."""

    cause: str = field(default="", kw_only=True)
    differences: Sequence[Difference] = field(default=(), kw_only=True)

    def metadata(self) -> dict[str, str]:
        """Return the facts that are known."""
        return {name: value for name, value in super().metadata().items() if value}


class PrefillEngineFailed(PeerError, code="PREFILL_ENGINE_FAILED"):
    """The engine of the prefill service failed at this prompt; another one may do better."""


class LeaseExpired(PeerError, code="LEASE_EXPIRED"):
    """The producer did not finish before the transfer's deadline."""


class ShuttingDown(PeerError, code="SHUTTING_DOWN"):
    """This service is shutting down and takes no new work."""

    blame = Blame.LOCAL


class RequestError(KVSpanError, code="REQUEST_INVALID"):
    """The client has to change the request."""

    blame = Blame.REMOTE


class InvalidRequest(RequestError, code="REQUEST_FIELD_INVALID"):
    """One or more fields of the request are wrong; lists all of them."""

    text = "{violations}"
    violations: Sequence[Violation]


class PromptTooLong(RequestError, code="REQUEST_CAN_NEVER_FIT"):
    """Prompt and new tokens can never fit a limit of this service; waiting would not help."""

    text = "request needs {needed} of {limit_name}, the limit is {limit}"
    limit_name: str
    needed: int
    limit: int


class UnknownModel(RequestError, code="UNKNOWN_MODEL"):
    """The request names a model this service does not serve."""

    text = "model {requested} is not served here; {served} is"
    requested: str
    served: str


class Cancelled(RequestError, code="REQUEST_CANCELLED"):
    """The client gave the request up, or its deadline passed."""

    text = "cancelled: {cause}"
    cause: str


class DeadlineExceeded(RequestError, code="DEADLINE_EXCEEDED"):
    """The request did not end within its time limit."""

    text = "{problem} within {limit_s:g} s"
    limit_s: float
    problem: str = "not finished"


class EngineError(KVSpanError, code="ENGINE_ERROR"):
    """The compute engine could not do its work."""


class EngineFailed(EngineError, code="ENGINE_FAILED"):
    """The engine raised while computing; the cause is chained."""

    text = "engine failed: {problem}"
    problem: str


class InvariantViolation(Exception):
    """Something that can only be our own bug; ends the service after the journal is written."""


def told(error: BaseException) -> str:
    """Return what anybody may read of an error that became part of another one.

    The text of an exception that nobody here wrote may name files, processes or a prompt; the log has it.
    """
    return str(error) if isinstance(error, KVSpanError) else type(error).__name__
