"""Identity and geometry cross the wire unchanged, and a peer that describes itself wrongly is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import RemoteProtocolError
from common.wire.convert_identity import (
    GRANULARITY,
    IDENTITY,
    VERSIONS,
    geometry_from_proto,
    geometry_to_proto,
)
from common.wire.fields import MAX_CONFIG_CHARS, MAX_CONFIG_FIELDS, MAX_LAYERS, MAX_TEXT_CHARS
from kvspan.v1 import geometry_pb2, transfer_pb2
from tests.support.factories import make_geometry, make_hybrid_geometry
from tests.support.wire import make_peer_identity


def test_identity_comes_back_equal() -> None:
    """Nothing of an identity is lost or reordered on the wire."""
    identity = make_peer_identity()

    assert IDENTITY.read("x", IDENTITY.write(identity)) == identity


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


def break_heads(proto: geometry_pb2.KVGeometry) -> None:
    """Make a layer without heads."""
    proto.layers[0].num_kv_heads = 0


def break_dtype(proto: geometry_pb2.KVGeometry) -> None:
    """Forget an element type."""
    proto.layers[0].dtype = geometry_pb2.KV_DATA_TYPE_UNSPECIFIED


def break_number_of_layers(proto: geometry_pb2.KVGeometry) -> None:
    """Have more layers than any model, each well-formed."""
    for index in range(len(proto.layers), MAX_LAYERS + 1):
        proto.layers.add().CopyFrom(proto.layers[0])
        proto.layers[index].layer_index = index


def break_many_indices(proto: geometry_pb2.KVGeometry) -> None:
    """Repeat a layer as often as layers are allowed."""
    for _ in range(len(proto.layers), MAX_LAYERS):
        proto.layers.add().CopyFrom(proto.layers[0])


def break_vocabulary(proto: geometry_pb2.KVGeometry) -> None:
    """Make logits of no value."""
    proto.vocab_size = 0


@pytest.mark.parametrize(
    "break_it",
    [
        break_layer_order,
        break_layers,
        break_number_of_layers,
        break_many_indices,
        break_heads,
        break_dtype,
        break_vocabulary,
    ],
)
def test_geometry_is_refused_when_malformed(break_it: Callable[[geometry_pb2.KVGeometry], None]) -> None:
    """A geometry that describes no cache is an error of the peer that names the geometry, in a few words."""
    proto = geometry_to_proto(make_hybrid_geometry())
    break_it(proto)

    with pytest.raises(RemoteProtocolError, match=r"^hello\.geometry") as refused:
        geometry_from_proto("hello.geometry", proto)
    assert len(str(refused.value)) < 500


def test_layers_are_counted_before_one_of_them_is_read() -> None:
    """A long list costs nothing: its layers, which are malformed, are not looked at."""
    proto = geometry_pb2.KVGeometry(layers=[geometry_pb2.LayerGeometry()] * 200_000)

    with pytest.raises(RemoteProtocolError, match=r"g\.layers is '200000 entries': must have at most 4096"):
        geometry_from_proto("g", proto)


def test_geometry_is_kept_when_it_has_the_largest_number_of_layers() -> None:
    """The limit itself is allowed."""
    geometry = make_geometry(num_layers=MAX_LAYERS)

    assert geometry_from_proto("g", geometry_to_proto(geometry)) == geometry


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({str(index): "1" for index in range(MAX_CONFIG_FIELDS + 1)}, "config_fields is '1025 entries'"),
        ({"k" * 1025: "1"}, "config_fields key is '1025 characters'"),
        ({"rope": "1" * (MAX_CONFIG_CHARS + 1)}, "config_fields[rope] is '262145 characters'"),
    ],
)
def test_config_is_refused_when_it_is_larger_than_any_model_has(config: dict[str, str], message: str) -> None:
    """Number of keys, their length and that of their values are the peer's choice."""
    proto = IDENTITY.write(replace(make_peer_identity(), config_fields=tuple(config.items())))

    with pytest.raises(RemoteProtocolError, match=f"^x.{re.escape(message)}: must have at most"):
        IDENTITY.read("x", proto)


def test_config_is_kept_when_it_is_the_largest() -> None:
    """The limits themselves are allowed."""
    values = ["1" * MAX_CONFIG_CHARS, *["2"] * (MAX_CONFIG_FIELDS - 1)]
    config = tuple((f"{index:04}".rjust(MAX_TEXT_CHARS, "k"), value) for index, value in enumerate(values))
    identity = replace(make_peer_identity(), config_fields=config)

    assert IDENTITY.read("x", IDENTITY.write(identity)) == identity


@pytest.mark.parametrize(
    "field", ["fingerprint.config", "fingerprint.weights", "fingerprint.tokenizer", "numerics.engine"]
)
def test_identity_is_refused_when_a_text_of_it_is_too_long(field: str) -> None:
    """Every text that is compared has a limit."""
    proto = IDENTITY.write(make_peer_identity())
    part, name = field.split(".")
    setattr(getattr(proto, part), name, "x" * 1025)

    with pytest.raises(RemoteProtocolError, match=f"^x.{field} is '1025 characters'"):
        IDENTITY.read("x", proto)


def test_name_of_a_model_is_cut() -> None:
    """It is for people alone and may be a path of any length."""
    proto = IDENTITY.write(replace(make_peer_identity(), model_name="x" * 5000))

    assert len(IDENTITY.read("x", proto).model_name) == MAX_TEXT_CHARS


@pytest.mark.parametrize("part", ["fingerprint", "geometry", "numerics"])
def test_identity_is_refused_when_a_part_is_missing(part: str) -> None:
    """An identity without a part would compare equal to nothing and differ in everything."""
    proto = IDENTITY.write(make_peer_identity())
    proto.ClearField(part)

    with pytest.raises(RemoteProtocolError, match=f"welcome.identity.{part} is None"):
        IDENTITY.read("welcome.identity", proto)


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 1), (3, 2), (0, 0)])
def test_versions_are_refused_when_no_range(minimum: int, maximum: int) -> None:
    """Versions count from 1 and the lowest is not above the highest."""
    proto = transfer_pb2.VersionRange(minimum=minimum, maximum=maximum)

    with pytest.raises(RemoteProtocolError, match=f"'minimum {minimum}, maximum {maximum}'"):
        VERSIONS.read("hello.versions", proto)


@pytest.mark.parametrize(("chunk", "minimum", "maximum"), [(8, 65, 64), (8, 0, 63), (8, 0, 2**63)])
def test_granularity_is_refused_when_it_cuts_no_spans(chunk: int, minimum: int, maximum: int) -> None:
    """Decode plans with the granularity it is told, so it must be one."""
    proto = transfer_pb2.SpanGranularity(chunk_tokens=chunk, min_span_bytes=minimum, max_span_bytes=maximum)

    with pytest.raises(RemoteProtocolError, match="granularity"):
        GRANULARITY.read("welcome.granularity", proto)
