"""One door for both directions, and for what a service says of itself."""

from __future__ import annotations

import pytest

from common.errors import RemoteProtocolError
from common.kv.digest import DigestKind
from common.kv.plan import SpanGranularity
from common.kv.spans import SPAN_LAYOUT
from common.session.identity import EngineFacts, Origin
from common.session.messages import PrefillCancelled, ReleaseSpan, TransferMode, VersionRange
from common.session.negotiation import PrefillOffer
from common.wire.convert import capabilities_from_proto, capabilities_to_proto, to_proto
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1.geometry_pb2 import (
    DIGEST_KIND_OFF,
    SPAN_LAYOUT_LAYER_KV_TOKEN_HEAD_DIM,
    TRANSFER_MODE_STREAM,
)
from kvspan.v1.transfer_pb2 import PrefillServiceGetCapabilitiesResponse as Capabilities
from tests.support.wire import make_peer_identity


def make_prefill_offer() -> PrefillOffer:
    """Return what a prefill service brings."""
    return PrefillOffer(
        versions=VersionRange(1, 2),
        boot_id="boot-p",
        identity=make_peer_identity(),
        modes=(TransferMode.WHOLE, TransferMode.STREAM),
        digests=(DigestKind.XXH3_64, DigestKind.OFF),
        layouts=(SPAN_LAYOUT,),
        granularity=SpanGranularity(
            chunk_tokens=8, min_span_bytes=128, max_span_bytes=512, layer_stops=(1, 3)
        ),
        max_prompt_tokens=40,
        max_concurrency=3,
        engine=EngineFacts("npu", Origin.DECLARED, (8, 40), can_resume=True),
        longest_step_ms=1700,
    )


def test_messages_go_to_the_type_of_their_sender() -> None:
    """Decode sends requests and prefill sends responses, whatever the message."""
    assert isinstance(to_proto(ReleaseSpan(21, 1, 5)), pb.TransferRequest)
    assert isinstance(to_proto(PrefillCancelled(21, 1)), pb.TransferResponse)


def test_capabilities_come_back_equal() -> None:
    """What a prefill service brings can be asked for before a session, by the same words."""
    offer = make_prefill_offer()

    proto = capabilities_to_proto(offer, linears="row-invariant", num_threads=2)

    assert capabilities_from_proto(proto) == offer
    assert (proto.linears, proto.num_threads) == ("row-invariant", 2)


@pytest.mark.parametrize("part", ["versions", "identity", "granularity"])
def test_capabilities_are_refused_when_a_part_is_missing(part: str) -> None:
    """An answer without a part is malformed, not a service without it."""
    proto = capabilities_to_proto(make_prefill_offer(), linears="", num_threads=2)
    proto.ClearField(part)

    with pytest.raises(RemoteProtocolError, match=f"capabilities.{part}"):
        capabilities_from_proto(proto)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (Capabilities(boot_id="x" * 1025), "boot_id is '1025 characters'"),
        (Capabilities(modes=[TRANSFER_MODE_STREAM] * 63), "modes is '65 entries'"),
        (Capabilities(digests=[DIGEST_KIND_OFF] * 63), "digests is '65 entries'"),
        (Capabilities(layouts=[SPAN_LAYOUT_LAYER_KV_TOKEN_HEAD_DIM] * 64), "layouts is '65 entries'"),
    ],
    ids=["boot", "modes", "digests", "layouts"],
)
def test_capabilities_are_refused_when_a_part_is_too_long(part: Capabilities, field: str) -> None:
    """A peer does not choose how long the service is busy with its words."""
    proto = capabilities_to_proto(make_prefill_offer(), linears="", num_threads=2)
    proto.MergeFrom(part)

    with pytest.raises(RemoteProtocolError, match=f"^capabilities.{field}: must have at most"):
        capabilities_from_proto(proto)
