"""Every value of an enum has a spelling on the wire, and every spelling a value."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from common.errors import RemoteProtocolError
from common.kv.digest import DigestKind
from common.kv.geometry import DType
from common.kv.spans import SPAN_LAYOUT
from common.session.messages import TransferMode
from common.wire.enums import DIGESTS, DTYPES, MODES, layout_name
from common.wire.fields import EnumTable
from kvspan.v1 import geometry_pb2 as pb


@pytest.mark.parametrize(
    ("table", "natives", "numbers"),
    [
        (DTYPES, DType, pb.KVDataType),
        (DIGESTS, DigestKind, pb.DigestKind),
        (MODES, TransferMode, pb.TransferMode),
    ],
)
def test_tables_pair_every_value_with_its_own_number(
    table: EnumTable[Any, Any], natives: type[Enum], numbers: Any
) -> None:
    """A value added on one side only would make a session fail where it is first used."""
    sent = {native: table.number(native) for native in natives}

    assert sorted(sent.values()) == [number for number in sorted(numbers.values()) if number != 0]
    assert all(table.native("x", number) is native for native, number in sent.items())


def test_layout_gets_a_name_when_only_the_peer_knows_it() -> None:
    """An unknown layout is refused by negotiation, which lists both names, and not as malformed."""
    assert layout_name("x", pb.SPAN_LAYOUT_LAYER_KV_TOKEN_HEAD_DIM) == SPAN_LAYOUT
    assert layout_name("x", 7) == "unknown layout 7"  # type: ignore[arg-type]


def test_layout_is_refused_when_unspecified() -> None:
    """A slab without a layout is malformed."""
    with pytest.raises(RemoteProtocolError, match=r"slab\.layout"):
        layout_name("slab.layout", pb.SPAN_LAYOUT_UNSPECIFIED)
