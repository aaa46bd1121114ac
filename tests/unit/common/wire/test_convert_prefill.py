"""Messages of prefill cross the wire unchanged, and malformed ones are refused by field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.errors import RemoteProtocolError
from common.kv.ranges import Range
from common.session.messages import (
    GoAway,
    PrefillDone,
    PrefillFailed,
    PrefillMessage,
    SourceTimings,
    SpanSealed,
)
from common.wire.convert import prefill_message_from_proto, to_proto
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1.geometry_pb2 import TRANSFER_MODE_STREAM
from tests.support.factories import make_span
from tests.support.wire import make_done_message, make_welcome_message


def make_sealed() -> SpanSealed:
    """Return a sealed span whose ranges do not start at zero."""
    return SpanSealed(make_span(tokens=Range(3, 8), sequence=6, digest=b"12345678"))


def test_response_is_refused_when_it_holds_no_message() -> None:
    """A newer message type arrives as an unset oneof and must not pass in silence."""
    with pytest.raises(RemoteProtocolError, match=r"transfer_response\.message"):
        prefill_message_from_proto(pb.TransferResponse())


def test_times_pass_whatever_they_are() -> None:
    """A clock that is wrong costs neither transfer nor session: what is not told is zero."""
    sealed, done = to_proto(make_sealed()), to_proto(make_done_message())
    sealed.kv_span.written_ns = -1
    done.prefill_done.ClearField("timings")

    span, end = prefill_message_from_proto(sealed), prefill_message_from_proto(done)

    assert isinstance(span, SpanSealed)
    assert span.span.written_ns == -1
    assert isinstance(end, PrefillDone)
    assert end.timings == SourceTimings(0, 0, 0)


@pytest.mark.parametrize("field", ["layers", "tokens"])
def test_span_is_refused_when_a_range_is_missing_or_reversed(field: str) -> None:
    """Ranges are told, never inferred."""
    proto = to_proto(make_sealed())
    proto.kv_span.ClearField(field)
    with pytest.raises(RemoteProtocolError, match=f"kv_span.{field} is None"):
        prefill_message_from_proto(proto)

    proto.kv_span.MergeFrom(pb.KVSpan(**{field: {"start": 9, "stop": 2}}))  # type: ignore[arg-type]

    with pytest.raises(RemoteProtocolError, match=f"kv_span.{field} is '\\[9, 2\\)'"):
        prefill_message_from_proto(proto)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (pb.Welcome(boot_id="x" * 1025), "boot_id is '1025 characters'"),
        (pb.Welcome(nonce=b"x" * 1025), "nonce is '1025 bytes'"),
        (pb.Welcome(modes=[TRANSFER_MODE_STREAM] * 64), "modes is '65 entries'"),
    ],
    ids=["boot", "nonce", "modes"],
)
def test_welcome_is_refused_when_a_part_is_too_long(part: pb.Welcome, field: str) -> None:
    """A peer does not choose how long the service is busy with its words."""
    proto = to_proto(make_welcome_message())
    proto.welcome.MergeFrom(part)

    with pytest.raises(RemoteProtocolError, match=f"^welcome.{field}: must have at most"):
        prefill_message_from_proto(proto)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (pb.TransferResponse(prefill_failed={"reason": "x" * 1025}), "prefill_failed.reason"),
        (pb.TransferResponse(kv_span={"digest": b"x" * 1025}), "kv_span.digest"),
        (pb.TransferResponse(prefill_done={"totals": [pb.GroupTotals()] * 4097}), "prefill_done.totals"),
    ],
    ids=["reason", "digest", "totals"],
)
def test_message_is_refused_when_a_part_is_too_long(part: pb.TransferResponse, field: str) -> None:
    """Reasons and digests are quoted in errors, and totals are compared with groups."""
    messages: dict[str, PrefillMessage] = {
        "prefill_failed": PrefillFailed(21, 1, "X", "why"),
        "kv_span": make_sealed(),
        "prefill_done": make_done_message(),
    }
    proto = to_proto(messages[field.split(".")[0]])
    proto.MergeFrom(part)

    with pytest.raises(RemoteProtocolError, match=f"^{field} is '[0-9]+ [a-z]+': must have at most"):
        prefill_message_from_proto(proto)


def test_words_for_people_are_cut() -> None:
    """Why a peer leaves and why it failed is shown to clients, whatever its length."""
    away = prefill_message_from_proto(to_proto(GoAway("x" * 5000)))
    failed = prefill_message_from_proto(to_proto(PrefillFailed(21, 1, "X", "x" * 5000)))

    assert isinstance(away, GoAway)
    assert isinstance(failed, PrefillFailed)
    assert (len(away.cause), len(failed.message)) == (1024, 1024)


@pytest.mark.parametrize(
    ("message", "field", "value", "problem"),
    [
        (make_sealed(), "kv_span.attempt", 0, "is 0:"),
        (make_sealed(), "kv_span.offset", 2**63, f"is {2**63}:"),
        (make_sealed(), "kv_span.length", 2**64 - 1, f"is {2**64 - 1}:"),
        (make_welcome_message(), "welcome.version", 0, "is 0:"),
        (make_welcome_message(), "welcome.digest", 0, "is 0:"),
        (make_welcome_message(), "welcome.max_prompt_tokens", 0, "is 0:"),
        (make_welcome_message(), "welcome.max_concurrency", 0, "is 0:"),
        (make_welcome_message(), "welcome.nonce", b"", ""),
        (PrefillFailed(21, 1, "X", "why"), "prefill_failed.reason", "", ""),
        (make_done_message(), "prefill_done.totals[1].num_bytes", 2**63, f"is {2**63}:"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_message_is_refused_when_a_field_makes_no_sense(
    message: PrefillMessage, field: str, value: object, problem: str
) -> None:
    """What no correct prefill sends, as a choice that was not made, is named with its value."""
    proto = to_proto(message)
    *parts, name = field.replace("[1]", "").split(".")
    target: Any = proto
    for part in parts:
        target = getattr(target, part)
    setattr(target[1] if "[1]" in field else target, name, value)

    with pytest.raises(RemoteProtocolError, match=f"^{re.escape(f'{field} {problem}'.strip())}"):
        prefill_message_from_proto(proto)
