import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvspan.v1 import geometry_pb2 as _geometry_pb2
from kvspan.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Route(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTE_UNSPECIFIED: _ClassVar[Route]
    ROUTE_AUTO: _ClassVar[Route]
    ROUTE_REMOTE: _ClassVar[Route]
    ROUTE_LOCAL: _ClassVar[Route]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_CONNECTING: _ClassVar[SessionState]
    SESSION_STATE_GREETING: _ClassVar[SessionState]
    SESSION_STATE_OPEN: _ClassVar[SessionState]
    SESSION_STATE_REFUSED: _ClassVar[SessionState]
    SESSION_STATE_CLOSED: _ClassVar[SessionState]
    SESSION_STATE_LEAVING: _ClassVar[SessionState]
ROUTE_UNSPECIFIED: Route
ROUTE_AUTO: Route
ROUTE_REMOTE: Route
ROUTE_LOCAL: Route
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_CONNECTING: SessionState
SESSION_STATE_GREETING: SessionState
SESSION_STATE_OPEN: SessionState
SESSION_STATE_REFUSED: SessionState
SESSION_STATE_CLOSED: SessionState
SESSION_STATE_LEAVING: SessionState

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "n", "prompt_logprobs", "grammar")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    n: int
    prompt_logprobs: int
    grammar: str
    def __init__(self, max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "chat", "tokens", "sampling", "route", "transfer", "request_id", "model", "literal_text")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LITERAL_TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatPrompt
    tokens: TokenPrompt
    sampling: SamplingParams
    route: Route
    transfer: _geometry_pb2.TransferMode
    request_id: str
    model: str
    literal_text: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., route: _Optional[_Union[Route, str]] = ..., transfer: _Optional[_Union[_geometry_pb2.TransferMode, str]] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., literal_text: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "generated_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queued", "waiting", "prefill", "exposed_transfer", "first_token", "decode", "total", "overlap", "num_spans", "num_spans_overlapped", "num_bytes", "route", "transfer", "clock_error")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    NUM_SPANS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPANS_OVERLAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_FIELD_NUMBER: _ClassVar[int]
    queued: _duration_pb2.Duration
    waiting: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    exposed_transfer: _duration_pb2.Duration
    first_token: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    total: _duration_pb2.Duration
    overlap: float
    num_spans: int
    num_spans_overlapped: int
    num_bytes: int
    route: Route
    transfer: _geometry_pb2.TransferMode
    clock_error: bool
    def __init__(self, queued: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., waiting: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., exposed_transfer: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., overlap: _Optional[float] = ..., num_spans: _Optional[int] = ..., num_spans_overlapped: _Optional[int] = ..., num_bytes: _Optional[int] = ..., route: _Optional[_Union[Route, str]] = ..., transfer: _Optional[_Union[_geometry_pb2.TransferMode, str]] = ..., clock_error: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "text", "logprobs", "finish_reason", "usage", "timings", "request_id", "prefill_engine")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    request_id: str
    prefill_engine: PrefillEngine
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., request_id: _Optional[str] = ..., prefill_engine: _Optional[_Union[PrefillEngine, _Mapping]] = ...) -> None: ...

class PrefillEngine(_message.Message):
    __slots__ = ("name", "numerics")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    numerics: str
    def __init__(self, name: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...

class DecodeServiceGetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeServiceGetCapabilitiesResponse(_message.Message):
    __slots__ = ("versions", "boot_id", "identity", "modes", "default_mode", "default_route", "routes", "digests", "num_lanes", "max_context_tokens", "linears", "num_threads", "page_tokens", "numerics_policy")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MODE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_ROUTE_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LANES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINEARS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_POLICY_FIELD_NUMBER: _ClassVar[int]
    versions: _transfer_pb2.VersionRange
    boot_id: str
    identity: _geometry_pb2.PeerIdentity
    modes: _containers.RepeatedScalarFieldContainer[_geometry_pb2.TransferMode]
    default_mode: _geometry_pb2.TransferMode
    default_route: Route
    routes: _containers.RepeatedScalarFieldContainer[Route]
    digests: _containers.RepeatedScalarFieldContainer[_geometry_pb2.DigestKind]
    num_lanes: int
    max_context_tokens: int
    linears: str
    num_threads: int
    page_tokens: int
    numerics_policy: _geometry_pb2.NumericsPolicy
    def __init__(self, versions: _Optional[_Union[_transfer_pb2.VersionRange, _Mapping]] = ..., boot_id: _Optional[str] = ..., identity: _Optional[_Union[_geometry_pb2.PeerIdentity, _Mapping]] = ..., modes: _Optional[_Iterable[_Union[_geometry_pb2.TransferMode, str]]] = ..., default_mode: _Optional[_Union[_geometry_pb2.TransferMode, str]] = ..., default_route: _Optional[_Union[Route, str]] = ..., routes: _Optional[_Iterable[_Union[Route, str]]] = ..., digests: _Optional[_Iterable[_Union[_geometry_pb2.DigestKind, str]]] = ..., num_lanes: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., linears: _Optional[str] = ..., num_threads: _Optional[int] = ..., page_tokens: _Optional[int] = ..., numerics_policy: _Optional[_Union[_geometry_pb2.NumericsPolicy, str]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FieldDifference(_message.Message):
    __slots__ = ("field", "decode_value", "prefill_value")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DECODE_VALUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_VALUE_FIELD_NUMBER: _ClassVar[int]
    field: str
    decode_value: str
    prefill_value: str
    def __init__(self, field: _Optional[str] = ..., decode_value: _Optional[str] = ..., prefill_value: _Optional[str] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("target", "state", "boot_id", "problem", "num_sessions", "num_transfers", "slab_leased_bytes", "slab_total_bytes", "num_slots", "reason", "differences", "num_clock_errors", "num_late_events", "num_unknown_messages", "num_duplicate_spans", "engine")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SLAB_LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_CLOCK_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNKNOWN_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATE_SPANS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    target: str
    state: SessionState
    boot_id: str
    problem: str
    num_sessions: int
    num_transfers: int
    slab_leased_bytes: int
    slab_total_bytes: int
    num_slots: int
    reason: str
    differences: _containers.RepeatedCompositeFieldContainer[FieldDifference]
    num_clock_errors: int
    num_late_events: int
    num_unknown_messages: int
    num_duplicate_spans: int
    engine: _geometry_pb2.EngineFacts
    def __init__(self, target: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., boot_id: _Optional[str] = ..., problem: _Optional[str] = ..., num_sessions: _Optional[int] = ..., num_transfers: _Optional[int] = ..., slab_leased_bytes: _Optional[int] = ..., slab_total_bytes: _Optional[int] = ..., num_slots: _Optional[int] = ..., reason: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[FieldDifference, _Mapping]]] = ..., num_clock_errors: _Optional[int] = ..., num_late_events: _Optional[int] = ..., num_unknown_messages: _Optional[int] = ..., num_duplicate_spans: _Optional[int] = ..., engine: _Optional[_Union[_geometry_pb2.EngineFacts, _Mapping]] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("group_index", "total_pages", "used_pages", "page_bytes")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    total_pages: int
    used_pages: int
    page_bytes: int
    def __init__(self, group_index: _Optional[int] = ..., total_pages: _Optional[int] = ..., used_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class ReservationCounts(_message.Message):
    __slots__ = ("queued", "transferring", "decoding", "draining")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRING_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    queued: int
    transferring: int
    decoding: int
    draining: int
    def __init__(self, queued: _Optional[int] = ..., transferring: _Optional[int] = ..., decoding: _Optional[int] = ..., draining: _Optional[int] = ...) -> None: ...

class RequestCounts(_message.Message):
    __slots__ = ("submitted", "finished", "failed", "cancelled", "refused", "retried", "queue_full")
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RETRIED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FULL_FIELD_NUMBER: _ClassVar[int]
    submitted: int
    finished: int
    failed: int
    cancelled: int
    refused: int
    retried: int
    queue_full: int
    def __init__(self, submitted: _Optional[int] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., refused: _Optional[int] = ..., retried: _Optional[int] = ..., queue_full: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("boot_id", "peers", "groups", "reservations", "lanes_used", "lanes_total", "queue_limit", "requests", "num_steps", "prompts_remote", "prompts_local", "num_tokens", "calls", "journal")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    LANES_USED_FIELD_NUMBER: _ClassVar[int]
    LANES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_REMOTE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    reservations: ReservationCounts
    lanes_used: int
    lanes_total: int
    queue_limit: int
    requests: RequestCounts
    num_steps: int
    prompts_remote: int
    prompts_local: int
    num_tokens: int
    calls: _transfer_pb2.CallCounts
    journal: _transfer_pb2.JournalStatus
    def __init__(self, boot_id: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., reservations: _Optional[_Union[ReservationCounts, _Mapping]] = ..., lanes_used: _Optional[int] = ..., lanes_total: _Optional[int] = ..., queue_limit: _Optional[int] = ..., requests: _Optional[_Union[RequestCounts, _Mapping]] = ..., num_steps: _Optional[int] = ..., prompts_remote: _Optional[int] = ..., prompts_local: _Optional[int] = ..., num_tokens: _Optional[int] = ..., calls: _Optional[_Union[_transfer_pb2.CallCounts, _Mapping]] = ..., journal: _Optional[_Union[_transfer_pb2.JournalStatus, _Mapping]] = ...) -> None: ...
