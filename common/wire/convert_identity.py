"""Identity and geometry of a peer, to and from the messages of geometry.proto.

Theory of operation: the wire names the group of every layer although it follows from the layers; a peer
that groups differently is refused here, since every span it told would mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.excerpt import excerpt
from common.kv.geometry import KVGeometry, LayerGeometry
from common.kv.plan import SpanGranularity
from common.session.identity import ModelFingerprint, Numerics, PeerIdentity
from common.session.messages import VersionRange
from common.wire.enums import DTYPES
from common.wire.fields import (
    MAX_CONFIG_CHARS,
    MAX_CONFIG_FIELDS,
    MAX_LAYERS,
    MAX_TEXT_CHARS,
    at_least,
    malformed,
    remark,
    require_set,
    require_short,
    text,
)
from kvspan.v1 import geometry_pb2, transfer_pb2


def identity_to_proto(identity: PeerIdentity) -> geometry_pb2.PeerIdentity:
    """Return the wire form of an identity."""
    fingerprint, numerics = identity.fingerprint, identity.numerics
    return geometry_pb2.PeerIdentity(
        model_name=identity.model_name,
        fingerprint=geometry_pb2.ModelFingerprint(
            config=fingerprint.config, weights=fingerprint.weights, tokenizer=fingerprint.tokenizer
        ),
        config_fields=dict(identity.config_fields),
        geometry=geometry_to_proto(identity.geometry),
        numerics=geometry_pb2.Numerics(engine=numerics.engine, chunk_tokens=numerics.chunk_tokens),
    )


def geometry_to_proto(geometry: KVGeometry) -> geometry_pb2.KVGeometry:
    """Return the wire form of a geometry, with the group of every layer."""
    group_of = _group_of_layer(geometry)
    return geometry_pb2.KVGeometry(
        layers=[
            geometry_pb2.LayerGeometry(
                layer_index=layer.layer_index,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                dtype=DTYPES.number(layer.dtype),
                window=layer.window or 0,
                group_index=group_of[layer.layer_index],
            )
            for layer in geometry.layers
        ],
        page_tokens=geometry.page_tokens,
        vocab_size=geometry.vocab_size,
    )


def versions_to_proto(versions: VersionRange) -> transfer_pb2.VersionRange:
    """Return the wire form of a range of protocol versions."""
    return transfer_pb2.VersionRange(minimum=versions.minimum, maximum=versions.maximum)


def granularity_to_proto(granularity: SpanGranularity) -> transfer_pb2.SpanGranularity:
    """Return the wire form of a granularity."""
    return transfer_pb2.SpanGranularity(
        chunk_tokens=granularity.chunk_tokens,
        min_span_bytes=granularity.min_span_bytes,
        max_span_bytes=granularity.max_span_bytes,
    )


def identity_from_proto(field: str, identity: geometry_pb2.PeerIdentity) -> PeerIdentity:
    """Return the identity in `identity`; `field` names where it was found.

    Raises: `RemoteProtocolError` when a part is missing or malformed.
    """
    for part in ("fingerprint", "geometry", "numerics"):
        require_set(f"{field}.{part}", identity.HasField(part))
    fingerprint, numerics = identity.fingerprint, identity.numerics
    return PeerIdentity(
        model_name=remark(identity.model_name),
        fingerprint=ModelFingerprint(
            config=text(f"{field}.fingerprint.config", fingerprint.config),
            weights=text(f"{field}.fingerprint.weights", fingerprint.weights),
            tokenizer=text(f"{field}.fingerprint.tokenizer", fingerprint.tokenizer),
        ),
        config_fields=_config_from_proto(f"{field}.config_fields", identity.config_fields),
        geometry=geometry_from_proto(f"{field}.geometry", identity.geometry),
        numerics=Numerics(
            engine=text(f"{field}.numerics.engine", numerics.engine),
            chunk_tokens=at_least(f"{field}.numerics.chunk_tokens", numerics.chunk_tokens, 1),
        ),
    )


def geometry_from_proto(field: str, geometry: geometry_pb2.KVGeometry) -> KVGeometry:
    """Return the geometry in `geometry`.

    Raises: `RemoteProtocolError` when a layer is malformed or in another group than its shape says, or when
    there are more layers than any model has.
    """
    require_short(f"{field}.layers", geometry.layers, MAX_LAYERS)
    layers = tuple(
        _layer_from_proto(f"{field}.layers[{index}]", layer) for index, layer in enumerate(geometry.layers)
    )
    vocab_size = at_least(f"{field}.vocab_size", geometry.vocab_size, 1)
    try:
        result = KVGeometry(layers, geometry.page_tokens, vocab_size)
    except ValueError as error:
        shape = f"{len(layers)} layers, page_tokens {geometry.page_tokens}"
        raise malformed(field, shape, str(error)) from error
    group_of = _group_of_layer(result)
    for index, layer in enumerate(geometry.layers):
        expected = group_of[layer.layer_index]
        if layer.group_index != expected:
            name = f"{field}.layers[{index}].group_index"
            raise malformed(name, layer.group_index, f"shape, type and window say {expected}")
    return result


def versions_from_proto(field: str, versions: transfer_pb2.VersionRange) -> VersionRange:
    """Return the range of protocol versions in `versions`."""
    if not 1 <= versions.minimum <= versions.maximum:
        value = f"{versions.minimum}..{versions.maximum}"
        raise malformed(field, value, "must have 1 <= minimum <= maximum")
    return VersionRange(versions.minimum, versions.maximum)


def granularity_from_proto(field: str, granularity: transfer_pb2.SpanGranularity) -> SpanGranularity:
    """Return the granularity in `granularity`."""
    max_span_bytes = at_least(f"{field}.max_span_bytes", granularity.max_span_bytes, 0)
    try:
        return SpanGranularity(granularity.chunk_tokens, granularity.min_span_bytes, max_span_bytes)
    except ValueError as error:
        value = f"{granularity.chunk_tokens}, {granularity.min_span_bytes}, {granularity.max_span_bytes}"
        raise malformed(field, value, str(error)) from error


def _config_from_proto(field: str, config: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    require_short(field, config, MAX_CONFIG_FIELDS)
    for name, value in config.items():
        require_short(f"{field} key", name, MAX_TEXT_CHARS, "characters")
        require_short(f"{field}[{excerpt(name)}]", value, MAX_CONFIG_CHARS, "characters")
    return tuple(sorted(config.items()))


def _layer_from_proto(field: str, layer: geometry_pb2.LayerGeometry) -> LayerGeometry:
    return LayerGeometry(
        layer_index=layer.layer_index,
        num_kv_heads=at_least(f"{field}.num_kv_heads", layer.num_kv_heads, 1),
        head_dim=at_least(f"{field}.head_dim", layer.head_dim, 1),
        dtype=DTYPES.native(f"{field}.dtype", layer.dtype),
        window=layer.window or None,
    )


def _group_of_layer(geometry: KVGeometry) -> dict[int, int]:
    return {
        layer_index: group.group_index for group in geometry.groups for layer_index in group.layer_indices
    }
