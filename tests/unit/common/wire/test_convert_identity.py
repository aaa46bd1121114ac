"""Identity and geometry cross the wire unchanged, and a peer that describes itself wrongly is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import RemoteProtocolError
from common.wire.convert_identity import (
    geometry_from_proto,
    geometry_to_proto,
    granularity_from_proto,
    identity_from_proto,
    identity_to_proto,
    versions_from_proto,
)
from kvspan.v1 import geometry_pb2, transfer_pb2
from tests.support.factories import make_hybrid_geometry
from tests.support.wire import make_peer_identity


def test_identity_comes_back_equal() -> None:
    """Nothing of an identity is lost or reordered on the wire."""
    identity = make_peer_identity()

    assert identity_from_proto("x", identity_to_proto(identity)) == identity


def test_geometry_tells_the_group_of_every_layer() -> None:
    """Groups are told although they follow from the layers, so that both sides can compare them."""
    proto = geometry_to_proto(make_hybrid_geometry(windows=(6, None, 6)))

    assert [layer.group_index for layer in proto.layers] == [0, 1, 0]
    assert [layer.window for layer in proto.layers] == [6, 0, 6]


def test_geometry_is_refused_when_the_peer_groups_differently() -> None:
    """A span names its group, so another grouping would put it into other layers."""
    proto = geometry_to_proto(make_hybrid_geometry(windows=(6, None, 6)))
    proto.layers[2].group_index = 2

    with pytest.raises(RemoteProtocolError, match=r"g\.layers\[2\]\.group_index is 2: .* say 0"):
        geometry_from_proto("g", proto)


def break_layer_order(proto: geometry_pb2.KVGeometry) -> None:
    """Repeat a layer."""
    proto.layers[1].layer_index = 0


def break_layers(proto: geometry_pb2.KVGeometry) -> None:
    """Leave no layer."""
    del proto.layers[:]


def break_page(proto: geometry_pb2.KVGeometry) -> None:
    """Make pages of no token."""
    proto.page_tokens = 0


def break_heads(proto: geometry_pb2.KVGeometry) -> None:
    """Make a layer without heads."""
    proto.layers[0].num_kv_heads = 0


def break_dtype(proto: geometry_pb2.KVGeometry) -> None:
    """Forget an element type."""
    proto.layers[0].dtype = geometry_pb2.KV_DATA_TYPE_UNSPECIFIED


def break_vocabulary(proto: geometry_pb2.KVGeometry) -> None:
    """Make logits of no value."""
    proto.vocab_size = 0


@pytest.mark.parametrize(
    "break_it", [break_layer_order, break_layers, break_page, break_heads, break_dtype, break_vocabulary]
)
def test_geometry_is_refused_when_malformed(break_it: Callable[[geometry_pb2.KVGeometry], None]) -> None:
    """A geometry that describes no cache is an error of the peer that names the geometry."""
    proto = geometry_to_proto(make_hybrid_geometry())
    break_it(proto)

    with pytest.raises(RemoteProtocolError, match=r"^hello\.geometry"):
        geometry_from_proto("hello.geometry", proto)


@pytest.mark.parametrize("part", ["fingerprint", "geometry", "numerics"])
def test_identity_is_refused_when_a_part_is_missing(part: str) -> None:
    """An identity without a part would compare equal to nothing and differ in everything."""
    proto = identity_to_proto(make_peer_identity())
    proto.ClearField(part)

    with pytest.raises(RemoteProtocolError, match=f"welcome.identity.{part} is None"):
        identity_from_proto("welcome.identity", proto)


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 1), (3, 2), (0, 0)])
def test_versions_are_refused_when_no_range(minimum: int, maximum: int) -> None:
    """Versions count from 1 and the lowest is not above the highest."""
    proto = transfer_pb2.VersionRange(minimum=minimum, maximum=maximum)

    with pytest.raises(RemoteProtocolError, match=f"'{minimum}..{maximum}'"):
        versions_from_proto("hello.versions", proto)


@pytest.mark.parametrize(("chunk", "minimum", "maximum"), [(0, 1, 64), (8, 65, 64), (8, 0, 2**63)])
def test_granularity_is_refused_when_it_cuts_no_spans(chunk: int, minimum: int, maximum: int) -> None:
    """Decode plans with the granularity it is told, so it must be one."""
    proto = transfer_pb2.SpanGranularity(chunk_tokens=chunk, min_span_bytes=minimum, max_span_bytes=maximum)

    with pytest.raises(RemoteProtocolError, match="granularity"):
        granularity_from_proto("welcome.granularity", proto)
