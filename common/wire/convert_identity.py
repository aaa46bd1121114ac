"""Identity and geometry of a peer, to and from the messages of `protos/kvspan/v1/geometry.proto`.

Theory of operation: the wire names the group of every layer although it follows from the layers; a peer
that groups differently is refused here, since every span it seals would mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.excerpt import excerpt
from common.kv.geometry import KVGeometry, LayerGeometry
from common.kv.plan import SpanGranularity
from common.session.identity import EngineFacts, ModelFingerprint, Numerics, PeerIdentity
from common.session.messages import VersionRange
from common.wire.enums import DTYPES, ORIGINS, origin_of
from common.wire.fields import (
    MAX_CHOICES,
    MAX_CONFIG_CHARS,
    MAX_CONFIG_FIELDS,
    MAX_LAYERS,
    MAX_TEXT_CHARS,
    malformed,
    require_short,
)
from common.wire.tables import COUNT, INDEX, PLAIN, REMARK, TEXT, Field, Table, list_of, one_of
from kvspan.v1 import geometry_pb2, transfer_pb2

# The group of a layer is no attribute of it: `geometry_to_proto` adds, `geometry_from_proto` compares it.
LAYER = Table(
    geometry_pb2.LayerGeometry,
    LayerGeometry,
    layer_index=PLAIN,
    num_kv_heads=COUNT,
    head_dim=COUNT,
    dtype=one_of(DTYPES),
    window=Field(lambda _, window: window or None, lambda window: window or 0),
)

GEOMETRY = Table(
    geometry_pb2.KVGeometry,
    KVGeometry,
    layers=list_of(LAYER.as_part(), MAX_LAYERS),
    vocab_size=COUNT,
)


def geometry_to_proto(geometry: KVGeometry) -> geometry_pb2.KVGeometry:
    """Return the wire form of a geometry, with the group of every layer."""
    wire, group_of = GEOMETRY.write(geometry), _group_of_layer(geometry)
    for layer in wire.layers:
        layer.group_index = group_of[layer.layer_index]
    return wire


def geometry_from_proto(path: str, wire: geometry_pb2.KVGeometry) -> KVGeometry:
    """Return the geometry in a message.

    Raises: `RemoteProtocolError` when a layer is malformed or in another group than its shape says, or when
    there are more layers than any model has.
    """
    geometry = GEOMETRY.read(path, wire)
    group_of = _group_of_layer(geometry)
    for index, layer in enumerate(wire.layers):
        expected = group_of[layer.layer_index]
        if layer.group_index != expected:
            name = f"{path}.layers[{index}].group_index"
            raise malformed(name, layer.group_index, f"shape, type and window say {expected}")
    return geometry


def _group_of_layer(geometry: KVGeometry) -> dict[int, int]:
    return {
        layer_index: group.group_index for group in geometry.groups for layer_index in group.layer_indices
    }


def _fields_from_proto(path: str, fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    require_short(path, fields, MAX_CONFIG_FIELDS)
    for name, value in fields.items():
        require_short(f"{path} key", name, MAX_TEXT_CHARS, "characters")
        require_short(f"{path}[{excerpt(name)}]", value, MAX_CONFIG_CHARS, "characters")
    return tuple(sorted(fields.items()))


def _version_range(minimum: int, maximum: int) -> VersionRange:
    if not 1 <= minimum <= maximum:
        raise ValueError("must have 1 <= minimum <= maximum")
    return VersionRange(minimum, maximum)


FINGERPRINT = Table(
    geometry_pb2.ModelFingerprint,
    ModelFingerprint,
    config=TEXT,
    weights=TEXT,
    tokenizer=TEXT,
    rounded_weights=REMARK,
)

NUMERICS = Table(geometry_pb2.Numerics, Numerics, engine=TEXT, chunk_tokens=PLAIN)

ENGINE = Table(
    geometry_pb2.EngineFacts,
    EngineFacts,
    name=REMARK,
    origin=Field(origin_of, ORIGINS.number),
    widths=list_of(COUNT, MAX_CHOICES),
    can_resume=PLAIN,
)

FACTS = Field(ENGINE.read, ENGINE.write)
"""No part that must be set: a peer of an older version has none, and hears of its version first."""


CANONICAL = Field(_fields_from_proto, dict)

IDENTITY = Table(
    geometry_pb2.PeerIdentity,
    PeerIdentity,
    model_name=REMARK,
    fingerprint=FINGERPRINT.as_part(),
    config_fields=CANONICAL,
    tokenizer_fields=CANONICAL,
    geometry=Field(geometry_from_proto, geometry_to_proto, is_part=True),
    numerics=NUMERICS.as_part(),
)

VERSIONS = Table(transfer_pb2.VersionRange, _version_range, minimum=PLAIN, maximum=PLAIN)

GRANULARITY = Table(
    transfer_pb2.SpanGranularity,
    SpanGranularity,
    chunk_tokens=PLAIN,
    min_span_bytes=PLAIN,
    max_span_bytes=INDEX,
    layer_stops=list_of(PLAIN, MAX_LAYERS),
)
