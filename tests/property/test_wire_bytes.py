"""Whatever bytes a peer sends, a message is understood or refused, and the session keeps its order."""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from common.errors import NegotiationError, RemoteProtocolError
from common.session.messages import PrefillAccepted, SpanSealed
from common.wire.convert import decode_message_from_proto, prefill_message_from_proto, to_proto
from kvspan.v1 import transfer_pb2 as pb
from tests.support.sessions import (
    SPANS,
    START,
    begin,
    make_done,
    make_hello,
    make_open_decode_session,
    make_open_prefill_session,
    make_start,
    make_welcome,
)

REQUESTS = (to_proto(make_hello()).SerializeToString(), to_proto(make_start()).SerializeToString())
RESPONSES = (
    to_proto(make_welcome()).SerializeToString(),
    to_proto(make_done(START, SPANS)).SerializeToString(),
    *(to_proto(SpanSealed(span)).SerializeToString() for span in SPANS),
)

Change = tuple[int, bytes]


def changed(valid: bytes, changes: list[Change]) -> bytes:
    """Return the bytes of a message with pieces of it overwritten."""
    damaged = bytearray(valid)
    for place, piece in changes:
        start = place % max(1, len(damaged))
        damaged[start : start + len(piece)] = piece
    return bytes(damaged)


CHANGES = st.lists(st.tuples(st.integers(0, 4096), st.binary(min_size=1, max_size=6)), max_size=5)


@given(st.one_of(st.binary(max_size=96), st.builds(changed, st.sampled_from(REQUESTS), CHANGES)))
def test_bytes_of_a_decode_service_are_understood_or_refused(sent: bytes) -> None:
    """No exception but the two that end a session, and the table of jobs stays whole."""
    session = make_open_prefill_session()

    with contextlib.suppress(DecodeError, RemoteProtocolError, NegotiationError):
        session.receive(decode_message_from_proto(pb.TransferRequest.FromString(sent)))

    session.check_integrity()


@given(st.one_of(st.binary(max_size=96), st.builds(changed, st.sampled_from(RESPONSES), CHANGES)))
def test_bytes_of_a_prefill_service_are_understood_or_refused(sent: bytes) -> None:
    """The same while a transfer waits for spans, whose messages are damaged too."""
    session = make_open_decode_session()
    begin(session)
    session.receive(PrefillAccepted(START.transfer_id, START.attempt, 0))

    with contextlib.suppress(DecodeError, RemoteProtocolError, NegotiationError):
        session.receive(prefill_message_from_proto(pb.TransferResponse.FromString(sent)))

    session.check_integrity()
