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
        SlabExhausted  PagesExhausted  LanesExhausted  QueueFull
      TransferError                one transfer is lost, no other is touched
        StaleGeneration  SpanOutOfRange  SpanOverlap  ChecksumMismatch
        CoverageIncomplete  TotalsMismatch  LogitsInvalid  PrefillFailed
      PeerError                    the other service is gone or late; try again
        PeerLost  PeerUnavailable  PrefillEngineFailed  LeaseExpired  ShuttingDown
      RequestError                 the client must change the request
        InvalidRequest  PromptTooLong  UnknownModel  Cancelled  DeadlineExceeded
      EngineError                  the compute engine failed
        EngineFailed  UnsupportedWidth
    InvariantViolation             our bug; not a KVSpanError; stops the service

Theory of operation: a leaf takes typed facts, stores them as attributes and builds its message from
them; `metadata()` gives the same facts as strings for a status detail. The mapping from class to gRPC
code is in `common/wire/status.py`, and an architecture test fails when a leaf has none.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from common.excerpt import excerpt


class Blame(enum.Enum):
    """Which side has to change something."""

    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field on which two peers disagree, with both values as text."""

    field: str
    decode_value: str
    prefill_value: str

    def __str__(self) -> str:
        return f"{self.field}: decode {self.decode_value}, prefill {self.prefill_value}"


class KVSpanError(Exception):
    """Base of every error with a meaning for the caller; only leaves are raised."""

    code: ClassVar[str] = "KVSPAN_ERROR"
    """Stable machine-readable reason, UPPER_SNAKE, at most 63 characters."""

    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without any change."""

    blame: ClassVar[Blame] = Blame.LOCAL

    def metadata(self) -> dict[str, str]:
        """Return the typed facts of this error as strings, keyed by attribute name."""
        facts = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {
            name: "; ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in facts.items()
        }


class ConfigError(KVSpanError):
    """A flag or a file of this service is wrong; the process exits with code 2."""

    code = "CONFIG_INVALID"

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field = field
        self.value = str(value)
        self.problem = problem
        super().__init__(f"{field}={value!s}: {problem}")


class UnsupportedModel(ConfigError):
    """The model has layers whose state kvspan cannot hand over; names them."""

    code = "MODEL_UNSUPPORTED"

    def __init__(self, model: str, layers: Sequence[str], problem: str) -> None:
        self.layers = tuple(layers)
        where = f" (layers: {', '.join(layers)})" if layers else ""
        super().__init__("model", model, problem + where)


class NegotiationError(KVSpanError):
    """The two services cannot work together; carries every difference, not the first.

    The text shows as much as a person reads: a peer chose number and length of the values.
    """

    code = "NEGOTIATION_FAILED"
    blame = Blame.REMOTE

    max_shown: ClassVar[int] = 40
    """Differences in the text, which tells the number of the others."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = tuple(differences)
        super().__init__(f"peers do not fit: {self._shown()}")

    def metadata(self) -> dict[str, str]:
        """Return the differences as far as the text of this error shows them."""
        return {"differences": self._shown()}

    def _shown(self) -> str:
        shown = [
            Difference(excerpt(one.field), excerpt(one.decode_value), excerpt(one.prefill_value))
            for one in self.differences[: self.max_shown]
        ]
        num_others = len(self.differences) - len(shown)
        return "; ".join(map(str, shown)) + (f"; and {num_others} more" if num_others else "")


class VersionMismatch(NegotiationError):
    """No protocol version is spoken by both."""

    code = "PROTOCOL_VERSION_MISMATCH"


class ModelMismatch(NegotiationError):
    """A fingerprint of config, weights or tokenizer, or the numerics, differs."""

    code = "MODEL_MISMATCH"


class GeometryMismatch(NegotiationError):
    """The shape, dtype, group, window or page size of some layer differs."""

    code = "KV_GEOMETRY_MISMATCH"


class LayoutMismatch(NegotiationError):
    """No span layout, transfer mode or digest kind is common to both."""

    code = "SPAN_LAYOUT_MISMATCH"


class SlabNotShared(NegotiationError):
    """The prefill service does not see the memory that the decode service made."""

    code = "SLAB_NOT_SHARED"


class ProtocolError(KVSpanError):
    """A message that the rules of the session do not allow in this state."""

    code = "PROTOCOL_VIOLATION"

    def __init__(self, rule: str, *, state: str = "", event: str = "") -> None:
        self.rule = rule
        self.state = state
        self.event = event
        where = f" (event {event} in state {state})" if event else ""
        super().__init__(rule + where)


class LocalProtocolError(ProtocolError):
    """We asked our own machine for something the rules forbid; nothing was sent."""

    code = "PROTOCOL_VIOLATION_LOCAL"


class RemoteProtocolError(ProtocolError):
    """The peer sent something the rules forbid; the session ends."""

    code = "PROTOCOL_VIOLATION_REMOTE"
    blame = Blame.REMOTE


class CapacityError(KVSpanError):
    """Full now; the same request may fit later."""

    code = "CAPACITY_EXHAUSTED"
    retryable = True

    def __init__(self, requested: int, free: int, unit: str) -> None:
        self.requested = requested
        self.free = free
        self.unit = unit
        super().__init__(f"{self.code}: {requested} {unit} requested, {free} free")


class SlabExhausted(CapacityError):
    """No gap in the slab is large enough for the slot."""

    code = "SLAB_EXHAUSTED"

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(requested, free, "slab bytes")


class PagesExhausted(CapacityError):
    """A group has too few free pages."""

    code = "PAGES_EXHAUSTED"

    def __init__(self, group_index: int, requested: int, free: int) -> None:
        self.group_index = group_index
        super().__init__(requested, free, f"pages of group {group_index}")


class LanesExhausted(CapacityError):
    """Every lane of the decode batch is taken."""

    code = "LANES_EXHAUSTED"

    def __init__(self, num_lanes: int) -> None:
        super().__init__(1, 0, f"of {num_lanes} lanes")


class QueueFull(CapacityError):
    """The bounded queue of waiting requests is full."""

    code = "QUEUE_FULL"

    def __init__(self, limit: int) -> None:
        super().__init__(1, 0, f"places in the queue of {limit}")


class TransferError(KVSpanError):
    """One transfer failed and publishes nothing; its neighbours are untouched."""

    code = "TRANSFER_FAILED"
    blame = Blame.REMOTE


class StaleGeneration(TransferError):
    """A message names a slot lease, attempt or boot that is over."""

    code = "STALE_GENERATION"

    def __init__(self, field: str, expected: int, actual: int) -> None:
        self.field = field
        self.expected = expected
        self.actual = actual
        super().__init__(f"{field} is {actual}, current is {expected}")


class SpanOutOfRange(TransferError):
    """A field of a span lies outside what this transfer may carry."""

    code = "SPAN_OUT_OF_RANGE"

    def __init__(self, field: str, actual: object, allowed: object) -> None:
        self.field = field
        self.actual = str(actual)
        self.allowed = str(allowed)
        super().__init__(f"span {field} is {actual!s}, allowed {allowed!s}")


class SpanOverlap(TransferError):
    """A span covers a position that another span covered already."""

    code = "SPAN_OVERLAP"

    def __init__(self, group_index: int, layer_index: int, tokens: str, placed: str) -> None:
        self.group_index = group_index
        self.layer_index = layer_index
        self.tokens = tokens
        self.placed = placed
        super().__init__(
            f"group {group_index} layer {layer_index}: tokens {tokens} overlap {placed} already placed"
        )


class ChecksumMismatch(TransferError):
    """The bytes of a span do not have the digest it was told with."""

    code = "KV_CHECKSUM"

    def __init__(self, sequence: int, expected: str, actual: str) -> None:
        self.sequence = sequence
        self.expected = expected
        self.actual = actual
        super().__init__(f"span {sequence}: digest {actual}, told {expected}")


class CoverageIncomplete(TransferError):
    """The producer ended while required positions were missing; lists group, layer and tokens."""

    code = "COVERAGE_INCOMPLETE"

    def __init__(self, missing: Sequence[str]) -> None:
        self.missing = tuple(missing)
        super().__init__("missing KV: " + "; ".join(self.missing))


class TotalsMismatch(TransferError):
    """The totals in PrefillDone disagree with what was told."""

    code = "TOTALS_MISMATCH"

    def __init__(self, field: str, told: int, received: int) -> None:
        self.field = field
        self.told = told
        self.received = received
        super().__init__(f"{field}: producer says {told}, received {received}")


class LogitsInvalid(TransferError):
    """The handed-over logits have a wrong length or a value that is not finite."""

    code = "LOGITS_INVALID"

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"logits: {problem}")


class PrefillFailed(TransferError):
    """The prefill service ended the transfer with an error of its own."""

    code = "PREFILL_FAILED"

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(f"prefill failed: {reason}: {message}")


class PeerError(KVSpanError):
    """The other service is gone, late or leaving; the same call may succeed later."""

    code = "PEER_ERROR"
    retryable = True
    blame = Blame.REMOTE

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)


class PeerLost(PeerError):
    """The session to the prefill service ended while this request depended on it."""

    code = "PREFILL_PEER_LOST"


class PeerUnavailable(PeerError):
    """No prefill service is connected; says why of each."""

    code = "PREFILL_UNAVAILABLE"

    def __init__(self, problem: str, *, cause: str = "", differences: Sequence[Difference] = ()) -> None:
        self.cause = cause
        self.differences = tuple(differences)
        super().__init__(problem)

    def metadata(self) -> dict[str, str]:
        """Return the facts that are known."""
        return {name: value for name, value in super().metadata().items() if value}


class PrefillEngineFailed(PeerError):
    """The engine of the prefill service failed at this prompt; another one may do better."""

    code = "PREFILL_ENGINE_FAILED"


class LeaseExpired(PeerError):
    """The producer did not finish before the transfer's deadline."""

    code = "LEASE_EXPIRED"


class ShuttingDown(PeerError):
    """This service is shutting down and takes no new work."""

    code = "SHUTTING_DOWN"
    blame = Blame.LOCAL


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that is wrong, and what would be right."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class RequestError(KVSpanError):
    """The client has to change the request."""

    code = "REQUEST_INVALID"
    blame = Blame.REMOTE


class InvalidRequest(RequestError):
    """One or more fields of the request are wrong; lists all of them."""

    code = "REQUEST_FIELD_INVALID"

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(map(str, self.violations)))


class PromptTooLong(RequestError):
    """Prompt and new tokens can never fit a limit of this service; waiting would not help."""

    code = "REQUEST_CAN_NEVER_FIT"

    def __init__(self, limit_name: str, needed: int, limit: int) -> None:
        self.limit_name = limit_name
        self.needed = needed
        self.limit = limit
        super().__init__(f"request needs {needed} of {limit_name}, the limit is {limit}")


class UnknownModel(RequestError):
    """The request names a model this service does not serve."""

    code = "UNKNOWN_MODEL"

    def __init__(self, requested: str, served: str) -> None:
        self.requested = requested
        self.served = served
        super().__init__(f"model {requested} is not served here; {served} is")


class Cancelled(RequestError):
    """The client gave the request up, or its deadline passed."""

    code = "REQUEST_CANCELLED"

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(f"cancelled: {cause}")


class DeadlineExceeded(RequestError):
    """The request did not end within its time limit."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(f"not finished within {limit_s:.1f} s")


class EngineError(KVSpanError):
    """The compute engine could not do its work."""

    code = "ENGINE_ERROR"


class EngineFailed(EngineError):
    """The engine raised while computing; the cause is chained."""

    code = "ENGINE_FAILED"

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"engine failed: {problem}")


class UnsupportedWidth(EngineError):
    """The engine has no compiled width for this many tokens."""

    code = "UNSUPPORTED_WIDTH"

    def __init__(self, tokens: int, widths: Sequence[int]) -> None:
        self.tokens = tokens
        self.widths = tuple(widths)
        super().__init__(f"no width for {tokens} tokens; widths are {list(widths)}")


class InvariantViolation(Exception):
    """Something that can only be our own bug; ends the service after the journal is written."""
