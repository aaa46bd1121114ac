"""Builders of small values for tests; every default number is different, so that a swapped axis shows."""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.geometry import DType, GroupGeometry, KVGeometry, LayerGeometry
from common.kv.plan import SpanGranularity, SpanPlan, plan_spans
from common.kv.ranges import Range
from common.kv.spans import Span, span_bytes
from decode_service.cache.spec import CacheGeometry


def make_range(start: int = 0, stop: int = 5) -> Range:
    """Return the positions [start, stop)."""
    return Range(start, stop)


def make_geometry(
    *,
    num_layers: int = 2,
    num_kv_heads: int = 3,
    head_dim: int = 8,
    dtype: DType = DType.FLOAT32,
    window: int | None = None,
    vocab_size: int = 11,
) -> KVGeometry:
    """Return a model whose layers are all alike: one group."""
    layers = tuple(LayerGeometry(index, num_kv_heads, head_dim, dtype, window) for index in range(num_layers))
    return KVGeometry(layers, vocab_size)


def make_hybrid_geometry(
    *,
    windows: tuple[int | None, ...] = (6, 6, None, 6, 6, None, 6),
    num_kv_heads: int = 3,
    head_dim: int = 8,
    full_head_dim: int = 16,
    dtype: DType = DType.FLOAT32,
    vocab_size: int = 11,
) -> KVGeometry:
    """Return a model with windowed layers and, with another head size, full attention layers."""
    layers = tuple(
        LayerGeometry(index, num_kv_heads, head_dim if window else full_head_dim, dtype, window)
        for index, window in enumerate(windows)
    )
    return KVGeometry(layers, vocab_size)


def paged(geometry: KVGeometry, page_tokens: int = 4) -> CacheGeometry:
    """Return a model's KV in pages."""
    return CacheGeometry.of(geometry, page_tokens)


def starts_of(geometry: KVGeometry, first_token: int, prompt_len: int) -> tuple[int, ...]:
    """Return the first position that is wanted of each group, of those from `first_token` on."""
    return tuple(tokens.start for tokens in geometry.required(first_token, prompt_len))


def plan_of(
    geometry: KVGeometry, first_token: int, prompt_len: int, granularity: SpanGranularity
) -> SpanPlan:
    """Return the spans of a prompt whose positions from `first_token` on are wanted where they are seen."""
    return plan_spans(geometry, geometry.required(first_token, prompt_len), granularity)


@dataclass(frozen=True, slots=True)
class SpanIdentity:
    """The fields of a span that say whose it is rather than what it covers."""

    transfer_id: int = 21
    attempt: int = 1
    slot_id: int = 7
    generation: int = 3
    written_ns: int = 1_000
    sealed_ns: int = 1_300


def make_span(
    group: GroupGeometry | None = None,
    layers: Range | None = None,
    tokens: Range | None = None,
    *,
    sequence: int = 0,
    offset: int = 4096,
    length: int | None = None,
    digest: bytes = b"",
    identity: SpanIdentity | None = None,
) -> Span:
    """Return a span of `group` with the length its shape asks for, unless told otherwise."""
    group = group if group is not None else make_geometry().groups[0]
    layers = layers if layers is not None else Range(0, group.num_layers)
    tokens = tokens if tokens is not None else make_range()
    identity = identity if identity is not None else SpanIdentity()
    return Span(
        transfer_id=identity.transfer_id,
        attempt=identity.attempt,
        slot_id=identity.slot_id,
        generation=identity.generation,
        sequence=sequence,
        group_index=group.group_index,
        layers=layers,
        tokens=tokens,
        offset=offset,
        length=length if length is not None else span_bytes(group, len(layers), len(tokens)),
        digest=digest,
        written_ns=identity.written_ns,
        sealed_ns=identity.sealed_ns,
    )
