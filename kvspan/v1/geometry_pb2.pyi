from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVDataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_DATA_TYPE_UNSPECIFIED: _ClassVar[KVDataType]
    KV_DATA_TYPE_BFLOAT16: _ClassVar[KVDataType]
    KV_DATA_TYPE_FLOAT16: _ClassVar[KVDataType]
    KV_DATA_TYPE_FLOAT32: _ClassVar[KVDataType]

class SpanLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_LAYOUT_UNSPECIFIED: _ClassVar[SpanLayout]
    SPAN_LAYOUT_LAYER_KV_TOKEN_HEAD_DIM: _ClassVar[SpanLayout]

class DigestKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIGEST_KIND_UNSPECIFIED: _ClassVar[DigestKind]
    DIGEST_KIND_OFF: _ClassVar[DigestKind]
    DIGEST_KIND_XXH3_64: _ClassVar[DigestKind]
    DIGEST_KIND_XXH3_128: _ClassVar[DigestKind]

class TransferMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_MODE_UNSPECIFIED: _ClassVar[TransferMode]
    TRANSFER_MODE_STREAM: _ClassVar[TransferMode]
    TRANSFER_MODE_DEFERRED: _ClassVar[TransferMode]
    TRANSFER_MODE_WHOLE: _ClassVar[TransferMode]

class NumericsPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NUMERICS_POLICY_UNSPECIFIED: _ClassVar[NumericsPolicy]
    NUMERICS_POLICY_EXACT: _ClassVar[NumericsPolicy]
    NUMERICS_POLICY_DECLARED: _ClassVar[NumericsPolicy]

class EngineOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ORIGIN_UNSPECIFIED: _ClassVar[EngineOrigin]
    ENGINE_ORIGIN_LOADED: _ClassVar[EngineOrigin]
    ENGINE_ORIGIN_DECLARED: _ClassVar[EngineOrigin]
KV_DATA_TYPE_UNSPECIFIED: KVDataType
KV_DATA_TYPE_BFLOAT16: KVDataType
KV_DATA_TYPE_FLOAT16: KVDataType
KV_DATA_TYPE_FLOAT32: KVDataType
SPAN_LAYOUT_UNSPECIFIED: SpanLayout
SPAN_LAYOUT_LAYER_KV_TOKEN_HEAD_DIM: SpanLayout
DIGEST_KIND_UNSPECIFIED: DigestKind
DIGEST_KIND_OFF: DigestKind
DIGEST_KIND_XXH3_64: DigestKind
DIGEST_KIND_XXH3_128: DigestKind
TRANSFER_MODE_UNSPECIFIED: TransferMode
TRANSFER_MODE_STREAM: TransferMode
TRANSFER_MODE_DEFERRED: TransferMode
TRANSFER_MODE_WHOLE: TransferMode
NUMERICS_POLICY_UNSPECIFIED: NumericsPolicy
NUMERICS_POLICY_EXACT: NumericsPolicy
NUMERICS_POLICY_DECLARED: NumericsPolicy
ENGINE_ORIGIN_UNSPECIFIED: EngineOrigin
ENGINE_ORIGIN_LOADED: EngineOrigin
ENGINE_ORIGIN_DECLARED: EngineOrigin

class IndexRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class LayerGeometry(_message.Message):
    __slots__ = ("layer_index", "num_kv_heads", "head_dim", "dtype", "window", "group_index")
    LAYER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    layer_index: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDataType
    window: int
    group_index: int
    def __init__(self, layer_index: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[KVDataType, str]] = ..., window: _Optional[int] = ..., group_index: _Optional[int] = ...) -> None: ...

class KVGeometry(_message.Message):
    __slots__ = ("layers", "vocab_size")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerGeometry]
    vocab_size: int
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerGeometry, _Mapping]]] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class ModelFingerprint(_message.Message):
    __slots__ = ("config", "weights", "tokenizer", "rounded_weights")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    ROUNDED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    config: str
    weights: str
    tokenizer: str
    rounded_weights: str
    def __init__(self, config: _Optional[str] = ..., weights: _Optional[str] = ..., tokenizer: _Optional[str] = ..., rounded_weights: _Optional[str] = ...) -> None: ...

class Numerics(_message.Message):
    __slots__ = ("engine", "chunk_tokens")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    chunk_tokens: int
    def __init__(self, engine: _Optional[str] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class EngineFacts(_message.Message):
    __slots__ = ("name", "origin", "widths", "can_resume")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    CAN_RESUME_FIELD_NUMBER: _ClassVar[int]
    name: str
    origin: EngineOrigin
    widths: _containers.RepeatedScalarFieldContainer[int]
    can_resume: bool
    def __init__(self, name: _Optional[str] = ..., origin: _Optional[_Union[EngineOrigin, str]] = ..., widths: _Optional[_Iterable[int]] = ..., can_resume: _Optional[bool] = ...) -> None: ...

class PeerIdentity(_message.Message):
    __slots__ = ("model_name", "fingerprint", "config_fields", "geometry", "numerics", "tokenizer_fields")
    class ConfigFieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TokenizerFieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELDS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELDS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    fingerprint: ModelFingerprint
    config_fields: _containers.ScalarMap[str, str]
    geometry: KVGeometry
    numerics: Numerics
    tokenizer_fields: _containers.ScalarMap[str, str]
    def __init__(self, model_name: _Optional[str] = ..., fingerprint: _Optional[_Union[ModelFingerprint, _Mapping]] = ..., config_fields: _Optional[_Mapping[str, str]] = ..., geometry: _Optional[_Union[KVGeometry, _Mapping]] = ..., numerics: _Optional[_Union[Numerics, _Mapping]] = ..., tokenizer_fields: _Optional[_Mapping[str, str]] = ...) -> None: ...
