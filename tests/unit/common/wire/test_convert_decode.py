"""Messages of decode cross the wire unchanged, and malformed ones are refused by field."""

from __future__ import annotations

import pytest

from common.errors import RemoteProtocolError
from common.session.messages import CancelPrefill, DecodeMessage, ReleaseSpan
from common.wire.convert_decode import decode_message_from_proto, decode_message_to_proto
from kvspan.v1 import transfer_pb2 as pb
from tests.support.wire import make_hello_message, make_start_message


@pytest.mark.parametrize(
    "message",
    [make_hello_message(), make_start_message(), ReleaseSpan(21, 1, 5), CancelPrefill(21, 2, "client left")],
    ids=lambda message: type(message).__name__,
)
def test_message_comes_back_equal(message: DecodeMessage) -> None:
    """Nothing of a message is lost between encoding and decoding."""
    encoded = decode_message_to_proto(message).SerializeToString()

    assert decode_message_from_proto(pb.TransferRequest.FromString(encoded)) == message


def test_request_is_refused_when_it_holds_no_message() -> None:
    """A newer message type arrives as an unset oneof and must not pass in silence."""
    with pytest.raises(RemoteProtocolError, match=r"transfer_request\.message"):
        decode_message_from_proto(pb.TransferRequest())


@pytest.mark.parametrize("part", ["versions", "identity", "slab"])
def test_hello_is_refused_when_a_part_is_missing(part: str) -> None:
    """Every part of a hello is needed to negotiate."""
    proto = decode_message_to_proto(make_hello_message())
    proto.hello.ClearField(part)

    with pytest.raises(RemoteProtocolError, match=f"hello.{part}"):
        decode_message_from_proto(proto)


@pytest.mark.parametrize("name", ["", ".", "..", "../etc/passwd", "/dev/shm/x", "a\0b"])
def test_hello_is_refused_when_its_slab_leaves_the_slab_directory(name: str) -> None:
    """A slab is named by a file name, so that no peer can make us open another file."""
    proto = decode_message_to_proto(make_hello_message())
    proto.hello.slab.name = name

    with pytest.raises(RemoteProtocolError, match=r"hello\.slab\.name"):
        decode_message_from_proto(proto)


@pytest.mark.parametrize(
    ("field", "value"), [("attempt", 0), ("mode", 0), ("slot_offset", 2**63), ("slot_size", 2**64 - 1)]
)
def test_start_is_refused_when_a_number_makes_no_sense(field: str, value: int) -> None:
    """A field outside what any correct decode sends is named with its value."""
    proto = decode_message_to_proto(make_start_message())
    setattr(proto.start_prefill, field, value)

    with pytest.raises(RemoteProtocolError, match=f"start_prefill.{field} is {value}:"):
        decode_message_from_proto(proto)


def test_start_is_refused_when_it_has_no_time_limit() -> None:
    """A transfer without a limit could hold a slot for ever."""
    proto = decode_message_to_proto(make_start_message())
    proto.start_prefill.ClearField("time_limit")

    with pytest.raises(RemoteProtocolError, match=r"start_prefill\.time_limit"):
        decode_message_from_proto(proto)
