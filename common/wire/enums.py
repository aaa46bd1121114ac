"""How the enums of the contract spell the values of this code, and back."""

from __future__ import annotations

from common.kv.digest import DigestKind
from common.kv.geometry import DType
from common.kv.spans import SPAN_LAYOUT
from common.session.identity import NumericsPolicy, Origin
from common.session.messages import TransferMode
from common.wire.fields import UNSPECIFIED, EnumTable, malformed
from kvspan.v1 import geometry_pb2 as pb

DTYPES = EnumTable(
    {
        DType.BFLOAT16: pb.KV_DATA_TYPE_BFLOAT16,
        DType.FLOAT16: pb.KV_DATA_TYPE_FLOAT16,
        DType.FLOAT32: pb.KV_DATA_TYPE_FLOAT32,
    }
)

DIGESTS = EnumTable(
    {
        DigestKind.OFF: pb.DIGEST_KIND_OFF,
        DigestKind.XXH3_64: pb.DIGEST_KIND_XXH3_64,
        DigestKind.XXH3_128: pb.DIGEST_KIND_XXH3_128,
    }
)

MODES = EnumTable(
    {
        TransferMode.STREAM: pb.TRANSFER_MODE_STREAM,
        TransferMode.DEFERRED: pb.TRANSFER_MODE_DEFERRED,
        TransferMode.WHOLE: pb.TRANSFER_MODE_WHOLE,
    }
)

POLICIES = EnumTable(
    {
        NumericsPolicy.EXACT: pb.NUMERICS_POLICY_EXACT,
        NumericsPolicy.DECLARED: pb.NUMERICS_POLICY_DECLARED,
    }
)

ORIGINS = EnumTable({Origin.LOADED: pb.ENGINE_ORIGIN_LOADED, Origin.DECLARED: pb.ENGINE_ORIGIN_DECLARED})

LAYOUTS = EnumTable({SPAN_LAYOUT: pb.SPAN_LAYOUT_LAYER_KV_TOKEN_HEAD_DIM})

UNKNOWN_LAYOUT = "unknown layout "
"""Prefix of the name of a layout that only the peer knows; negotiation refuses it with both names."""


def policy_of(field: str, number: pb.NumericsPolicy) -> NumericsPolicy:
    """Return the policy of a peer; one of an older version, which has none, hears of its version first."""
    return NumericsPolicy.EXACT if number == UNSPECIFIED else POLICIES.native(field, number)


def origin_of(field: str, number: pb.EngineOrigin) -> Origin:
    """Return how an engine knows its checkpoint; see `policy_of`."""
    return Origin.LOADED if number == UNSPECIFIED else ORIGINS.native(field, number)


def layout_name(field: str, number: pb.SpanLayout) -> str:
    """Return the name of a layout, also of one that is not known here."""
    if number == UNSPECIFIED:
        raise malformed(field, int(number), "must be set")
    return next(iter(LAYOUTS.offered(field, (number,))), f"{UNKNOWN_LAYOUT}{int(number)}")
