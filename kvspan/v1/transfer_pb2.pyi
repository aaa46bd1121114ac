import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvspan.v1 import geometry_pb2 as _geometry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillServiceGetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceGetCapabilitiesResponse(_message.Message):
    __slots__ = ("versions", "boot_id", "identity", "modes", "digests", "layouts", "granularity", "max_prompt_tokens", "max_concurrency", "can_skip_prefix", "linears", "num_threads")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    CAN_SKIP_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LINEARS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    versions: VersionRange
    boot_id: str
    identity: _geometry_pb2.PeerIdentity
    modes: _containers.RepeatedScalarFieldContainer[_geometry_pb2.TransferMode]
    digests: _containers.RepeatedScalarFieldContainer[_geometry_pb2.DigestKind]
    layouts: _containers.RepeatedScalarFieldContainer[_geometry_pb2.SpanLayout]
    granularity: SpanGranularity
    max_prompt_tokens: int
    max_concurrency: int
    can_skip_prefix: bool
    linears: str
    num_threads: int
    def __init__(self, versions: _Optional[_Union[VersionRange, _Mapping]] = ..., boot_id: _Optional[str] = ..., identity: _Optional[_Union[_geometry_pb2.PeerIdentity, _Mapping]] = ..., modes: _Optional[_Iterable[_Union[_geometry_pb2.TransferMode, str]]] = ..., digests: _Optional[_Iterable[_Union[_geometry_pb2.DigestKind, str]]] = ..., layouts: _Optional[_Iterable[_Union[_geometry_pb2.SpanLayout, str]]] = ..., granularity: _Optional[_Union[SpanGranularity, _Mapping]] = ..., max_prompt_tokens: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., can_skip_prefix: _Optional[bool] = ..., linears: _Optional[str] = ..., num_threads: _Optional[int] = ...) -> None: ...

class VersionRange(_message.Message):
    __slots__ = ("minimum", "maximum")
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    minimum: int
    maximum: int
    def __init__(self, minimum: _Optional[int] = ..., maximum: _Optional[int] = ...) -> None: ...

class SpanGranularity(_message.Message):
    __slots__ = ("chunk_tokens", "min_span_bytes", "max_span_bytes")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_SPAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SPAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    min_span_bytes: int
    max_span_bytes: int
    def __init__(self, chunk_tokens: _Optional[int] = ..., min_span_bytes: _Optional[int] = ..., max_span_bytes: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("name", "size_bytes", "layout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    layout: _geometry_pb2.SpanLayout
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., layout: _Optional[_Union[_geometry_pb2.SpanLayout, str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("versions", "boot_id", "identity", "modes", "digests", "slab")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    versions: VersionRange
    boot_id: str
    identity: _geometry_pb2.PeerIdentity
    modes: _containers.RepeatedScalarFieldContainer[_geometry_pb2.TransferMode]
    digests: _containers.RepeatedScalarFieldContainer[_geometry_pb2.DigestKind]
    slab: SlabHandle
    def __init__(self, versions: _Optional[_Union[VersionRange, _Mapping]] = ..., boot_id: _Optional[str] = ..., identity: _Optional[_Union[_geometry_pb2.PeerIdentity, _Mapping]] = ..., modes: _Optional[_Iterable[_Union[_geometry_pb2.TransferMode, str]]] = ..., digests: _Optional[_Iterable[_Union[_geometry_pb2.DigestKind, str]]] = ..., slab: _Optional[_Union[SlabHandle, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "boot_id", "identity", "modes", "digest", "granularity", "max_prompt_tokens", "max_concurrency", "can_skip_prefix", "nonce")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    CAN_SKIP_PREFIX_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    boot_id: str
    identity: _geometry_pb2.PeerIdentity
    modes: _containers.RepeatedScalarFieldContainer[_geometry_pb2.TransferMode]
    digest: _geometry_pb2.DigestKind
    granularity: SpanGranularity
    max_prompt_tokens: int
    max_concurrency: int
    can_skip_prefix: bool
    nonce: bytes
    def __init__(self, version: _Optional[int] = ..., boot_id: _Optional[str] = ..., identity: _Optional[_Union[_geometry_pb2.PeerIdentity, _Mapping]] = ..., modes: _Optional[_Iterable[_Union[_geometry_pb2.TransferMode, str]]] = ..., digest: _Optional[_Union[_geometry_pb2.DigestKind, str]] = ..., granularity: _Optional[_Union[SpanGranularity, _Mapping]] = ..., max_prompt_tokens: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., can_skip_prefix: _Optional[bool] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class StartPrefill(_message.Message):
    __slots__ = ("transfer_id", "attempt", "slot_id", "generation", "slot_offset", "slot_size", "token_ids", "first_token", "mode", "time_limit", "request_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLOT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLOT_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    slot_id: int
    generation: int
    slot_offset: int
    slot_size: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_token: int
    mode: _geometry_pb2.TransferMode
    time_limit: _duration_pb2.Duration
    request_id: str
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., slot_id: _Optional[int] = ..., generation: _Optional[int] = ..., slot_offset: _Optional[int] = ..., slot_size: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_token: _Optional[int] = ..., mode: _Optional[_Union[_geometry_pb2.TransferMode, str]] = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("transfer_id", "attempt", "slot_id", "generation", "sequence", "group_index", "layers", "tokens", "offset", "length", "digest", "written_ns", "told_ns")
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
    TOLD_NS_FIELD_NUMBER: _ClassVar[int]
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
    told_ns: int
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., slot_id: _Optional[int] = ..., generation: _Optional[int] = ..., sequence: _Optional[int] = ..., group_index: _Optional[int] = ..., layers: _Optional[_Union[_geometry_pb2.IndexRange, _Mapping]] = ..., tokens: _Optional[_Union[_geometry_pb2.IndexRange, _Mapping]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ..., written_ns: _Optional[int] = ..., told_ns: _Optional[int] = ...) -> None: ...

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
