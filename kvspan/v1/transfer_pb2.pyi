import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvspan.v1 import geometry_pb2 as _geometry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillSessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFILL_SESSION_STATE_UNSPECIFIED: _ClassVar[PrefillSessionState]
    PREFILL_SESSION_STATE_WAITING: _ClassVar[PrefillSessionState]
    PREFILL_SESSION_STATE_ATTACHING: _ClassVar[PrefillSessionState]
    PREFILL_SESSION_STATE_OPEN: _ClassVar[PrefillSessionState]
    PREFILL_SESSION_STATE_LEAVING: _ClassVar[PrefillSessionState]
    PREFILL_SESSION_STATE_CLOSED: _ClassVar[PrefillSessionState]

class PrefillPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFILL_PHASE_UNSPECIFIED: _ClassVar[PrefillPhase]
    PREFILL_PHASE_COMPUTING: _ClassVar[PrefillPhase]
    PREFILL_PHASE_WAITING_FOR_CREDIT: _ClassVar[PrefillPhase]
PREFILL_SESSION_STATE_UNSPECIFIED: PrefillSessionState
PREFILL_SESSION_STATE_WAITING: PrefillSessionState
PREFILL_SESSION_STATE_ATTACHING: PrefillSessionState
PREFILL_SESSION_STATE_OPEN: PrefillSessionState
PREFILL_SESSION_STATE_LEAVING: PrefillSessionState
PREFILL_SESSION_STATE_CLOSED: PrefillSessionState
PREFILL_PHASE_UNSPECIFIED: PrefillPhase
PREFILL_PHASE_COMPUTING: PrefillPhase
PREFILL_PHASE_WAITING_FOR_CREDIT: PrefillPhase

class PrefillServiceGetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceGetCapabilitiesResponse(_message.Message):
    __slots__ = ("versions", "boot_id", "identity", "modes", "digests", "layouts", "granularity", "max_prompt_tokens", "max_concurrency", "linears", "num_threads", "longest_step_ms", "engine")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    LINEARS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    versions: VersionRange
    boot_id: str
    identity: _geometry_pb2.PeerIdentity
    modes: _containers.RepeatedScalarFieldContainer[_geometry_pb2.TransferMode]
    digests: _containers.RepeatedScalarFieldContainer[_geometry_pb2.DigestKind]
    layouts: _containers.RepeatedScalarFieldContainer[_geometry_pb2.SpanLayout]
    granularity: SpanGranularity
    max_prompt_tokens: int
    max_concurrency: int
    linears: str
    num_threads: int
    longest_step_ms: int
    engine: _geometry_pb2.EngineFacts
    def __init__(self, versions: _Optional[_Union[VersionRange, _Mapping]] = ..., boot_id: _Optional[str] = ..., identity: _Optional[_Union[_geometry_pb2.PeerIdentity, _Mapping]] = ..., modes: _Optional[_Iterable[_Union[_geometry_pb2.TransferMode, str]]] = ..., digests: _Optional[_Iterable[_Union[_geometry_pb2.DigestKind, str]]] = ..., layouts: _Optional[_Iterable[_Union[_geometry_pb2.SpanLayout, str]]] = ..., granularity: _Optional[_Union[SpanGranularity, _Mapping]] = ..., max_prompt_tokens: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., linears: _Optional[str] = ..., num_threads: _Optional[int] = ..., longest_step_ms: _Optional[int] = ..., engine: _Optional[_Union[_geometry_pb2.EngineFacts, _Mapping]] = ...) -> None: ...

class PrefillServiceGetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceGetStatusResponse(_message.Message):
    __slots__ = ("boot_id", "sessions", "num_queued", "running", "totals", "calls", "journal")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    sessions: _containers.RepeatedCompositeFieldContainer[PrefillSessionStatus]
    num_queued: int
    running: RunningPrefill
    totals: PrefillTotals
    calls: CallCounts
    journal: JournalStatus
    def __init__(self, boot_id: _Optional[str] = ..., sessions: _Optional[_Iterable[_Union[PrefillSessionStatus, _Mapping]]] = ..., num_queued: _Optional[int] = ..., running: _Optional[_Union[RunningPrefill, _Mapping]] = ..., totals: _Optional[_Union[PrefillTotals, _Mapping]] = ..., calls: _Optional[_Union[CallCounts, _Mapping]] = ..., journal: _Optional[_Union[JournalStatus, _Mapping]] = ...) -> None: ...

class CallCounts(_message.Message):
    __slots__ = ("exhausted", "broken")
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    exhausted: int
    broken: int
    def __init__(self, exhausted: _Optional[int] = ..., broken: _Optional[int] = ...) -> None: ...

class JournalStatus(_message.Message):
    __slots__ = ("num_lines", "num_bytes", "is_lost")
    NUM_LINES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    num_lines: int
    num_bytes: int
    is_lost: bool
    def __init__(self, num_lines: _Optional[int] = ..., num_bytes: _Optional[int] = ..., is_lost: _Optional[bool] = ...) -> None: ...

class IgnoredCounts(_message.Message):
    __slots__ = ("unknown_messages", "repeated_starts", "ignored_releases", "dropped_spans")
    UNKNOWN_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    REPEATED_STARTS_FIELD_NUMBER: _ClassVar[int]
    IGNORED_RELEASES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_SPANS_FIELD_NUMBER: _ClassVar[int]
    unknown_messages: int
    repeated_starts: int
    ignored_releases: int
    dropped_spans: int
    def __init__(self, unknown_messages: _Optional[int] = ..., repeated_starts: _Optional[int] = ..., ignored_releases: _Optional[int] = ..., dropped_spans: _Optional[int] = ...) -> None: ...

class PrefillSessionStatus(_message.Message):
    __slots__ = ("session", "peer_boot_id", "state", "slab_bytes", "pinned_bytes", "num_queued", "num_running", "num_sealed_spans", "goes_last", "ignored")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PEER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SEALED_SPANS_FIELD_NUMBER: _ClassVar[int]
    GOES_LAST_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    session: int
    peer_boot_id: str
    state: PrefillSessionState
    slab_bytes: int
    pinned_bytes: int
    num_queued: int
    num_running: int
    num_sealed_spans: int
    goes_last: bool
    ignored: IgnoredCounts
    def __init__(self, session: _Optional[int] = ..., peer_boot_id: _Optional[str] = ..., state: _Optional[_Union[PrefillSessionState, str]] = ..., slab_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., num_sealed_spans: _Optional[int] = ..., goes_last: _Optional[bool] = ..., ignored: _Optional[_Union[IgnoredCounts, _Mapping]] = ...) -> None: ...

class RunningPrefill(_message.Message):
    __slots__ = ("request_id", "session", "transfer_id", "num_tokens", "phase", "run_time", "wait_time")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RUN_TIME_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session: int
    transfer_id: int
    num_tokens: int
    phase: PrefillPhase
    run_time: _duration_pb2.Duration
    wait_time: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., session: _Optional[int] = ..., transfer_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., phase: _Optional[_Union[PrefillPhase, str]] = ..., run_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PrefillTotals(_message.Message):
    __slots__ = ("sessions_opened", "sessions_ended", "accepted", "done", "failed", "cancelled", "expired", "abandoned", "refused", "sealed_spans", "sealed_bytes", "ignored")
    SESSIONS_OPENED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_ENDED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SEALED_SPANS_FIELD_NUMBER: _ClassVar[int]
    SEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    sessions_opened: int
    sessions_ended: int
    accepted: int
    done: int
    failed: int
    cancelled: int
    expired: int
    abandoned: int
    refused: int
    sealed_spans: int
    sealed_bytes: int
    ignored: IgnoredCounts
    def __init__(self, sessions_opened: _Optional[int] = ..., sessions_ended: _Optional[int] = ..., accepted: _Optional[int] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., expired: _Optional[int] = ..., abandoned: _Optional[int] = ..., refused: _Optional[int] = ..., sealed_spans: _Optional[int] = ..., sealed_bytes: _Optional[int] = ..., ignored: _Optional[_Union[IgnoredCounts, _Mapping]] = ...) -> None: ...

class VersionRange(_message.Message):
    __slots__ = ("minimum", "maximum")
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    minimum: int
    maximum: int
    def __init__(self, minimum: _Optional[int] = ..., maximum: _Optional[int] = ...) -> None: ...

class SpanGranularity(_message.Message):
    __slots__ = ("chunk_tokens", "min_span_bytes", "max_span_bytes", "layer_stops")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_SPAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SPAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_STOPS_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    min_span_bytes: int
    max_span_bytes: int
    layer_stops: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, chunk_tokens: _Optional[int] = ..., min_span_bytes: _Optional[int] = ..., max_span_bytes: _Optional[int] = ..., layer_stops: _Optional[_Iterable[int]] = ...) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ("hello", "start_prefill", "release_span", "cancel_prefill", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_PREFILL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SPAN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    start_prefill: StartPrefill
    release_span: ReleaseSpan
    cancel_prefill: CancelPrefill
    ping: Ping
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., start_prefill: _Optional[_Union[StartPrefill, _Mapping]] = ..., release_span: _Optional[_Union[ReleaseSpan, _Mapping]] = ..., cancel_prefill: _Optional[_Union[CancelPrefill, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class TransferResponse(_message.Message):
    __slots__ = ("welcome", "prefill_accepted", "kv_span", "prefill_done", "prefill_failed", "prefill_cancelled", "pong", "go_away")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    KV_SPAN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    GO_AWAY_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    prefill_accepted: PrefillAccepted
    kv_span: KVSpan
    prefill_done: PrefillDone
    prefill_failed: PrefillFailed
    prefill_cancelled: PrefillCancelled
    pong: Pong
    go_away: GoAway
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., prefill_accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., kv_span: _Optional[_Union[KVSpan, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., prefill_failed: _Optional[_Union[PrefillFailed, _Mapping]] = ..., prefill_cancelled: _Optional[_Union[PrefillCancelled, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., go_away: _Optional[_Union[GoAway, _Mapping]] = ...) -> None: ...

class SlabHandle(_message.Message):
    __slots__ = ("size_bytes", "layout", "socket")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    layout: _geometry_pb2.SpanLayout
    socket: str
    def __init__(self, size_bytes: _Optional[int] = ..., layout: _Optional[_Union[_geometry_pb2.SpanLayout, str]] = ..., socket: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("versions", "boot_id", "identity", "modes", "digests", "slab", "numerics_policy")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_POLICY_FIELD_NUMBER: _ClassVar[int]
    versions: VersionRange
    boot_id: str
    identity: _geometry_pb2.PeerIdentity
    modes: _containers.RepeatedScalarFieldContainer[_geometry_pb2.TransferMode]
    digests: _containers.RepeatedScalarFieldContainer[_geometry_pb2.DigestKind]
    slab: SlabHandle
    numerics_policy: _geometry_pb2.NumericsPolicy
    def __init__(self, versions: _Optional[_Union[VersionRange, _Mapping]] = ..., boot_id: _Optional[str] = ..., identity: _Optional[_Union[_geometry_pb2.PeerIdentity, _Mapping]] = ..., modes: _Optional[_Iterable[_Union[_geometry_pb2.TransferMode, str]]] = ..., digests: _Optional[_Iterable[_Union[_geometry_pb2.DigestKind, str]]] = ..., slab: _Optional[_Union[SlabHandle, _Mapping]] = ..., numerics_policy: _Optional[_Union[_geometry_pb2.NumericsPolicy, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "boot_id", "identity", "modes", "digest", "granularity", "max_prompt_tokens", "max_concurrency", "nonce", "longest_step_ms", "engine")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    version: int
    boot_id: str
    identity: _geometry_pb2.PeerIdentity
    modes: _containers.RepeatedScalarFieldContainer[_geometry_pb2.TransferMode]
    digest: _geometry_pb2.DigestKind
    granularity: SpanGranularity
    max_prompt_tokens: int
    max_concurrency: int
    nonce: bytes
    longest_step_ms: int
    engine: _geometry_pb2.EngineFacts
    def __init__(self, version: _Optional[int] = ..., boot_id: _Optional[str] = ..., identity: _Optional[_Union[_geometry_pb2.PeerIdentity, _Mapping]] = ..., modes: _Optional[_Iterable[_Union[_geometry_pb2.TransferMode, str]]] = ..., digest: _Optional[_Union[_geometry_pb2.DigestKind, str]] = ..., granularity: _Optional[_Union[SpanGranularity, _Mapping]] = ..., max_prompt_tokens: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., nonce: _Optional[bytes] = ..., longest_step_ms: _Optional[int] = ..., engine: _Optional[_Union[_geometry_pb2.EngineFacts, _Mapping]] = ...) -> None: ...

class StartPrefill(_message.Message):
    __slots__ = ("transfer_id", "attempt", "slot_id", "generation", "slot_offset", "slot_size", "token_ids", "mode", "time_limit", "request_id", "first_tokens")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLOT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLOT_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    slot_id: int
    generation: int
    slot_offset: int
    slot_size: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    mode: _geometry_pb2.TransferMode
    time_limit: _duration_pb2.Duration
    request_id: str
    first_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., slot_id: _Optional[int] = ..., generation: _Optional[int] = ..., slot_offset: _Optional[int] = ..., slot_size: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., mode: _Optional[_Union[_geometry_pb2.TransferMode, str]] = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ..., first_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("transfer_id", "attempt", "queue_position")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    queue_position: int
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., queue_position: _Optional[int] = ...) -> None: ...

class KVSpan(_message.Message):
    __slots__ = ("transfer_id", "attempt", "slot_id", "generation", "sequence", "group_index", "layers", "tokens", "offset", "length", "digest", "written_ns", "sealed_ns")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_NS_FIELD_NUMBER: _ClassVar[int]
    SEALED_NS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    slot_id: int
    generation: int
    sequence: int
    group_index: int
    layers: _geometry_pb2.IndexRange
    tokens: _geometry_pb2.IndexRange
    offset: int
    length: int
    digest: bytes
    written_ns: int
    sealed_ns: int
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., slot_id: _Optional[int] = ..., generation: _Optional[int] = ..., sequence: _Optional[int] = ..., group_index: _Optional[int] = ..., layers: _Optional[_Union[_geometry_pb2.IndexRange, _Mapping]] = ..., tokens: _Optional[_Union[_geometry_pb2.IndexRange, _Mapping]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ..., written_ns: _Optional[int] = ..., sealed_ns: _Optional[int] = ...) -> None: ...

class GroupTotals(_message.Message):
    __slots__ = ("group_index", "num_spans", "num_bytes", "layer_tokens")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SPANS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    num_spans: int
    num_bytes: int
    layer_tokens: int
    def __init__(self, group_index: _Optional[int] = ..., num_spans: _Optional[int] = ..., num_bytes: _Optional[int] = ..., layer_tokens: _Optional[int] = ...) -> None: ...

class SourceTimings(_message.Message):
    __slots__ = ("accepted_ns", "started_ns", "ended_ns")
    ACCEPTED_NS_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_NS_FIELD_NUMBER: _ClassVar[int]
    accepted_ns: int
    started_ns: int
    ended_ns: int
    def __init__(self, accepted_ns: _Optional[int] = ..., started_ns: _Optional[int] = ..., ended_ns: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("transfer_id", "attempt", "generation", "totals", "logits", "timings")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    generation: int
    totals: _containers.RepeatedCompositeFieldContainer[GroupTotals]
    logits: bytes
    timings: SourceTimings
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., generation: _Optional[int] = ..., totals: _Optional[_Iterable[_Union[GroupTotals, _Mapping]]] = ..., logits: _Optional[bytes] = ..., timings: _Optional[_Union[SourceTimings, _Mapping]] = ...) -> None: ...

class PrefillFailed(_message.Message):
    __slots__ = ("transfer_id", "attempt", "reason", "message")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    reason: str
    message: str
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PrefillCancelled(_message.Message):
    __slots__ = ("transfer_id", "attempt")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class GoAway(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class ReleaseSpan(_message.Message):
    __slots__ = ("transfer_id", "attempt", "sequence")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    sequence: int
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class CancelPrefill(_message.Message):
    __slots__ = ("transfer_id", "attempt", "cause")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    cause: str
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...
