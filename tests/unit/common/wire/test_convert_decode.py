"""Messages of decode cross the wire unchanged, and malformed ones are refused by field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import RemoteProtocolError, VersionMismatch
from common.session.messages import CancelPrefill, Hello, StartPrefill
from common.session.negotiation import negotiate
from common.wire.convert import decode_message_from_proto, to_proto
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1.geometry_pb2 import DIGEST_KIND_OFF, TRANSFER_MODE_STREAM
from tests.support.sessions import make_offer
from tests.support.wire import make_hello_message, make_start_message


def test_request_is_refused_when_it_holds_no_message() -> None:
    """A newer message type arrives as an unset oneof and must not pass in silence."""
    with pytest.raises(RemoteProtocolError, match=r"transfer_request\.message"):
        decode_message_from_proto(pb.TransferRequest())


@pytest.mark.parametrize("part", ["versions", "identity", "slab"])
def test_hello_is_refused_when_a_part_is_missing(part: str) -> None:
    """Every part of a hello is needed to negotiate."""
    proto = to_proto(make_hello_message())
    proto.hello.ClearField(part)

    with pytest.raises(RemoteProtocolError, match=f"hello.{part}"):
        decode_message_from_proto(proto)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (pb.Hello(boot_id="x" * 1025), "boot_id is '1025 characters'"),
        (pb.Hello(slab={"socket": "x" * 1025}), "slab.socket is '1025 characters'"),
        (pb.Hello(modes=[TRANSFER_MODE_STREAM] * 65), "modes is '67 entries'"),
        (pb.Hello(digests=[DIGEST_KIND_OFF] * 65), "digests is '67 entries'"),
    ],
    ids=["boot", "slab", "modes", "digests"],
)
def test_hello_is_refused_when_a_part_is_too_long(part: pb.Hello, field: str) -> None:
    """A peer does not choose how long the service is busy with its words."""
    proto = to_proto(make_hello_message())
    proto.hello.MergeFrom(part)

    with pytest.raises(RemoteProtocolError, match=f"^hello.{field}: must have at most"):
        decode_message_from_proto(proto)


def test_words_for_people_are_cut() -> None:
    """The cause of a cancel and the client's name for a request go to logs, whatever their length."""
    cancel = decode_message_from_proto(to_proto(CancelPrefill(21, 2, "x" * 5000)))
    start = decode_message_from_proto(to_proto(replace(make_start_message(), request_id="x" * 5000)))

    assert isinstance(cancel, CancelPrefill)
    assert isinstance(start, StartPrefill)
    assert (len(cancel.cause), len(start.request_id)) == (1024, 1024)


def test_a_hello_of_version_1_is_refused_by_its_versions() -> None:
    """It names no socket, which must not hide what is wrong with it."""
    proto = to_proto(make_hello_message())
    proto.hello.slab.ClearField("socket")
    proto.hello.versions.maximum = proto.hello.versions.minimum = 1
    hello = decode_message_from_proto(proto)
    assert isinstance(hello, Hello)

    with pytest.raises(VersionMismatch, match=r"protocol: decode 1\.\.1, prefill 3\.\.3"):
        negotiate(hello, make_offer())


@pytest.mark.parametrize("name", [".", "..", "../etc/passwd", "/dev/shm/x", "a\0b"])
def test_hello_is_refused_when_its_slab_leaves_the_slab_directory(name: str) -> None:
    """A slab is named by the file name of its socket, so that no peer can make us open another file."""
    proto = to_proto(make_hello_message())
    proto.hello.slab.socket = name

    with pytest.raises(RemoteProtocolError, match=r"hello\.slab\.socket"):
        decode_message_from_proto(proto)


@pytest.mark.parametrize(
    ("field", "value"), [("attempt", 0), ("mode", 0), ("slot_offset", 2**63), ("slot_size", 2**64 - 1)]
)
def test_start_is_refused_when_a_number_makes_no_sense(field: str, value: int) -> None:
    """A field outside what any correct decode sends is named with its value."""
    proto = to_proto(make_start_message())
    setattr(proto.start_prefill, field, value)

    with pytest.raises(RemoteProtocolError, match=f"start_prefill.{field} is {value}:"):
        decode_message_from_proto(proto)


def test_start_is_refused_when_its_prompt_is_longer_than_any() -> None:
    """Tokens are counted before anything is built of them."""
    proto = to_proto(make_start_message())
    proto.start_prefill.token_ids[:] = [1] * ((1 << 20) + 1)

    with pytest.raises(RemoteProtocolError, match=r"start_prefill\.token_ids is '1048577 tokens': must have"):
        decode_message_from_proto(proto)


def test_start_is_refused_when_it_has_no_time_limit() -> None:
    """A transfer without a limit could hold a slot for ever."""
    proto = to_proto(make_start_message())
    proto.start_prefill.ClearField("time_limit")

    with pytest.raises(RemoteProtocolError, match=r"start_prefill\.time_limit"):
        decode_message_from_proto(proto)
