"""Arbitrary valid messages cross the wire unchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.kv.digest import DigestKind
from common.kv.geometry import DType, KVGeometry, LayerGeometry
from common.kv.plan import SpanGranularity
from common.kv.ranges import Range
from common.kv.spans import SPAN_LAYOUT, Span
from common.session.identity import (
    EngineFacts,
    ModelFingerprint,
    Numerics,
    NumericsPolicy,
    Origin,
    PeerIdentity,
)
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    GoAway,
    GroupTotals,
    Hello,
    Ping,
    Pong,
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillMessage,
    ReleaseSpan,
    SlabHandle,
    SourceTimings,
    SpanSealed,
    StartPrefill,
    TransferMode,
    VersionRange,
    Welcome,
)
from common.wire.convert import decode_message_from_proto, prefill_message_from_proto, to_proto
from kvspan.v1 import transfer_pb2

UINT32 = st.integers(0, 2**32 - 1)
COUNT = st.integers(1, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INDEX = st.integers(0, 2**63 - 1)
TEXT = st.text(min_size=1, max_size=9)
FREE_TEXT = st.text(max_size=9)

RANGES = st.builds(lambda start, stop: Range(*sorted((start, stop))), INDEX, INDEX)

LAYERS = st.builds(
    LayerGeometry,
    layer_index=st.just(0),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 3),
    dtype=st.sampled_from(DType),
    window=st.none() | st.integers(1, 3),
)


def _geometry(layers: list[LayerGeometry], gaps: list[int], vocab_size: int) -> KVGeometry:
    """Number the layers so that they ascend with gaps, as when some own no KV."""
    position = -1
    numbered = []
    for layer, gap in zip(layers, gaps, strict=False):
        position += gap
        numbered.append(
            LayerGeometry(position, layer.num_kv_heads, layer.head_dim, layer.dtype, layer.window)
        )
    return KVGeometry(tuple(numbered), vocab_size)


GEOMETRIES = st.builds(
    _geometry,
    st.lists(LAYERS, min_size=1, max_size=6),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
    COUNT,
)

CANONICAL = st.dictionaries(TEXT, FREE_TEXT, max_size=3).map(lambda d: tuple(sorted(d.items())))

IDENTITIES = st.builds(
    PeerIdentity,
    model_name=FREE_TEXT,
    fingerprint=st.builds(ModelFingerprint, TEXT, TEXT, TEXT, FREE_TEXT),
    config_fields=CANONICAL,
    geometry=GEOMETRIES,
    numerics=st.builds(Numerics, TEXT, UINT32),
    tokenizer_fields=CANONICAL,
)

MODES = st.lists(st.sampled_from(TransferMode), max_size=3).map(tuple)

GRANULARITIES = st.builds(
    lambda chunk, low, high, stops: SpanGranularity(
        chunk, min(low, high), max(low, high, 64), tuple(sorted(stops))
    ),
    UINT32,
    INDEX,
    INDEX,
    st.sets(UINT32, max_size=3),
)

ENGINES = st.builds(
    EngineFacts, FREE_TEXT, st.sampled_from(Origin), st.lists(COUNT, max_size=3).map(tuple), st.booleans()
)

DECODE_MESSAGES: st.SearchStrategy[DecodeMessage] = st.one_of(
    st.builds(
        Hello,
        versions=st.builds(lambda a, b: VersionRange(min(a, b), max(a, b)), COUNT, COUNT),
        boot_id=TEXT,
        identity=IDENTITIES,
        modes=MODES,
        digests=st.lists(st.sampled_from(DigestKind), max_size=3).map(tuple),
        slab=st.builds(
            SlabHandle, st.from_regex(r"[a-z][a-z0-9.-]*", fullmatch=True), COUNT, st.just(SPAN_LAYOUT)
        ),
        numerics_policy=st.sampled_from(NumericsPolicy),
    ),
    st.builds(
        StartPrefill,
        transfer_id=UINT64,
        attempt=COUNT,
        slot_id=UINT32,
        generation=UINT64,
        slot_offset=INDEX,
        slot_size=INDEX,
        token_ids=st.lists(UINT32, max_size=5).map(tuple),
        first_tokens=st.lists(UINT32, max_size=3).map(tuple),
        mode=st.sampled_from(TransferMode),
        time_limit_s=st.integers(0, 10**7).map(lambda milliseconds: milliseconds / 1000),
        request_id=FREE_TEXT,
    ),
    st.builds(ReleaseSpan, UINT64, COUNT, UINT32),
    st.builds(CancelPrefill, UINT64, COUNT, FREE_TEXT),
    st.builds(Ping, UINT64),
)

SPANS = st.builds(
    Span,
    transfer_id=UINT64,
    attempt=COUNT,
    slot_id=UINT32,
    generation=UINT64,
    sequence=UINT32,
    group_index=UINT32,
    layers=RANGES,
    tokens=RANGES,
    offset=INDEX,
    length=INDEX,
    digest=st.binary(max_size=16),
    written_ns=INDEX,
    sealed_ns=INDEX,
)

PREFILL_MESSAGES: st.SearchStrategy[PrefillMessage] = st.one_of(
    st.builds(
        Welcome,
        version=COUNT,
        boot_id=TEXT,
        identity=IDENTITIES,
        modes=MODES,
        digest=st.sampled_from(DigestKind),
        granularity=GRANULARITIES,
        max_prompt_tokens=COUNT,
        max_concurrency=COUNT,
        engine=ENGINES,
        nonce=st.binary(min_size=1, max_size=32),
        longest_step_ms=UINT32,
    ),
    st.builds(PrefillAccepted, UINT64, COUNT, UINT32),
    st.builds(SpanSealed, SPANS),
    st.builds(
        PrefillDone,
        transfer_id=UINT64,
        attempt=COUNT,
        generation=UINT64,
        totals=st.lists(st.builds(GroupTotals, UINT32, UINT32, INDEX, INDEX), max_size=3).map(tuple),
        logits=st.binary(max_size=12),
        timings=st.builds(SourceTimings, INDEX, INDEX, INDEX),
    ),
    st.builds(PrefillFailed, UINT64, COUNT, TEXT, FREE_TEXT),
    st.builds(PrefillCancelled, UINT64, COUNT),
    st.builds(Pong, UINT64),
    st.builds(GoAway, FREE_TEXT),
)


@given(DECODE_MESSAGES)
def test_messages_of_decode_come_back_equal(message: DecodeMessage) -> None:
    """Encoding, parsing and decoding a valid message gives the same message."""
    encoded = to_proto(message).SerializeToString()

    assert decode_message_from_proto(transfer_pb2.TransferRequest.FromString(encoded)) == message


@given(PREFILL_MESSAGES)
def test_messages_of_prefill_come_back_equal(message: PrefillMessage) -> None:
    """Encoding, parsing and decoding a valid message gives the same message."""
    encoded = to_proto(message).SerializeToString()

    assert prefill_message_from_proto(transfer_pb2.TransferResponse.FromString(encoded)) == message
