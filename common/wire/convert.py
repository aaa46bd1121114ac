"""The messages of a session to and from their wire form: the one door the services use.

Theory of operation: one converter per direction and service. A message that no correct peer sends raises
`RemoteProtocolError` with the name and the value of the field; what a correct message means is decided by
the machines in `common/session`.
"""

from __future__ import annotations

from typing import overload

from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    Hello,
    Ping,
    PrefillMessage,
    ReleaseSpan,
    StartPrefill,
)
from common.session.negotiation import PrefillOffer
from common.wire.convert_decode import decode_message_from_proto, decode_message_to_proto
from common.wire.convert_identity import (
    granularity_from_proto,
    granularity_to_proto,
    identity_from_proto,
    identity_to_proto,
    versions_from_proto,
    versions_to_proto,
)
from common.wire.convert_prefill import prefill_message_from_proto, prefill_message_to_proto
from common.wire.enums import DIGESTS, LAYOUTS, MODES, layout_name
from common.wire.fields import MAX_CHOICES, at_least, require_set, require_short, text
from kvspan.v1 import transfer_pb2 as pb

__all__ = [
    "capabilities_from_proto",
    "capabilities_to_proto",
    "decode_message_from_proto",
    "identity_from_proto",
    "identity_to_proto",
    "prefill_message_from_proto",
    "to_proto",
]

_DECODE_MESSAGES = (ReleaseSpan, StartPrefill, CancelPrefill, Hello, Ping)


@overload
def to_proto(message: DecodeMessage) -> pb.TransferRequest: ...
@overload
def to_proto(message: PrefillMessage) -> pb.TransferResponse: ...
def to_proto(message: DecodeMessage | PrefillMessage) -> pb.TransferRequest | pb.TransferResponse:
    """Return the wire form of a message of either side."""
    if isinstance(message, _DECODE_MESSAGES):
        return decode_message_to_proto(message)
    return prefill_message_to_proto(message)


def capabilities_to_proto(
    offer: PrefillOffer, *, linears: str, num_threads: int
) -> pb.PrefillServiceGetCapabilitiesResponse:
    """Return the answer of a prefill service to GetCapabilities."""
    return pb.PrefillServiceGetCapabilitiesResponse(
        versions=versions_to_proto(offer.versions),
        boot_id=offer.boot_id,
        identity=identity_to_proto(offer.identity),
        modes=[MODES.number(mode) for mode in offer.modes],
        digests=[DIGESTS.number(kind) for kind in offer.digests],
        layouts=[LAYOUTS.number(layout) for layout in offer.layouts],
        granularity=granularity_to_proto(offer.granularity),
        max_prompt_tokens=offer.max_prompt_tokens,
        max_concurrency=offer.max_concurrency,
        can_skip_prefix=offer.can_skip_prefix,
        linears=linears,
        num_threads=num_threads,
    )


def capabilities_from_proto(capabilities: pb.PrefillServiceGetCapabilitiesResponse) -> PrefillOffer:
    """Return what a prefill service offers.

    Raises: `RemoteProtocolError` when a part is missing or malformed.
    """
    for part in ("versions", "identity", "granularity"):
        require_set(f"capabilities.{part}", capabilities.HasField(part))
    require_short("capabilities.layouts", capabilities.layouts, MAX_CHOICES)
    return PrefillOffer(
        versions=versions_from_proto("capabilities.versions", capabilities.versions),
        boot_id=text("capabilities.boot_id", capabilities.boot_id),
        identity=identity_from_proto("capabilities.identity", capabilities.identity),
        modes=MODES.offered("capabilities.modes", capabilities.modes),
        digests=DIGESTS.offered("capabilities.digests", capabilities.digests),
        layouts=tuple(layout_name("capabilities.layouts", layout) for layout in capabilities.layouts),
        granularity=granularity_from_proto("capabilities.granularity", capabilities.granularity),
        max_prompt_tokens=at_least("capabilities.max_prompt_tokens", capabilities.max_prompt_tokens, 1),
        max_concurrency=at_least("capabilities.max_concurrency", capabilities.max_concurrency, 1),
        can_skip_prefix=capabilities.can_skip_prefix,
    )
