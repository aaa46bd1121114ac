"""Messages as tables: the walker, and that no field of the contract was forgotten."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from common.errors import RemoteProtocolError
from common.session.messages import SlabHandle, VersionRange
from common.wire import convert, convert_identity
from common.wire.tables import COUNT, PLAIN, TEXT, Table, list_of
from kvspan.v1 import transfer_pb2 as pb

TABLES: dict[str, Table[Any, Any]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (convert, convert_identity)
    for name, value in vars(module).items()
    if isinstance(value, Table)
} | {f"convert.{name}": table for name, table in (convert.REQUESTS | convert.RESPONSES).items()}

ELSEWHERE = {
    "LayerGeometry": {"group_index"},
    "PrefillServiceGetCapabilitiesResponse": {"linears", "num_threads"},
}
"""Fields of the wire that are no attribute of the message: compared, or for people alone."""

SLAB = Table(
    pb.SlabHandle, SlabHandle, socket=TEXT.named("name"), size_bytes=COUNT.named("size_bytes"), layout=PLAIN
)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_every_field_of_its_message(name: str) -> None:
    """A field that the contract gains is read and written, or this fails."""
    table = TABLES[name]
    wire = table.wire.DESCRIPTOR  # type: ignore[attr-defined]

    assert set(table.fields) | ELSEWHERE.get(wire.name, set()) == {field.name for field in wire.fields}
    if isinstance(table.native, type):
        attributes = {field.attribute for field in table.fields.values()}
        assert attributes == {field.name for field in fields(table.native)}


def test_every_message_of_a_stream_is_converted() -> None:
    """A message that the contract gains has a table; those of every span are written out."""
    requests, responses = pb.TransferRequest.DESCRIPTOR, pb.TransferResponse.DESCRIPTOR

    assert {*convert.REQUESTS, "release_span"} == {field.name for field in requests.fields}
    assert {*convert.RESPONSES, "kv_span"} == {field.name for field in responses.fields}


def test_a_field_is_named_by_its_path_and_its_wire_name() -> None:
    """Whoever wrote the other side looks for the name in the contract."""
    with pytest.raises(RemoteProtocolError, match=r"^hello\.slab\.size_bytes is 0: must be in"):
        SLAB.read("hello.slab", pb.SlabHandle(socket="x"))


def test_an_entry_of_a_list_is_named_by_its_index() -> None:
    """One of several thousand layers can be found."""
    with pytest.raises(RemoteProtocolError, match=r"^x\[1\]\.socket is '': must not be empty"):
        list_of(SLAB.as_part(), 2).read("x", [pb.SlabHandle(socket="x", size_bytes=1), pb.SlabHandle()])


def test_values_that_make_no_sense_together_are_all_named() -> None:
    """The constructor of this side refuses; the error is the peer's and shows what was told."""

    def refuse(minimum: int, maximum: int) -> VersionRange:
        raise ValueError("must ascend")

    table = Table(pb.VersionRange, refuse, minimum=PLAIN, maximum=PLAIN)

    with pytest.raises(RemoteProtocolError, match=r"^v is 'minimum 3, maximum 2': must ascend$"):
        table.read("v", pb.VersionRange(minimum=3, maximum=2))
