"""The command `check`: whether two services fit, field by field, before any session is tried.

Theory of operation: both are asked for their capabilities, and the rule that a session starts with
(`common.session.negotiation`) judges them; this command only prints what that rule compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from common.errors import NegotiationError
from common.excerpt import excerpt
from common.kv.spans import SPAN_LAYOUT
from common.session.messages import Hello, SlabHandle
from common.session.negotiation import ABSENT, PrefillOffer, compared_fields, negotiate
from kvspan.commands.command import EXIT_FAILED, EXIT_OK, Command
from kvspan.commands.flags import parse_flag
from kvspan.commands.remote import told_failures
from kvspan.commands.values import target_address

if TYPE_CHECKING:
    from kvspan.v1.decode_pb2 import DecodeServiceGetCapabilitiesResponse

CALL_TIME_LIMIT_S = 10.0

SHOWN_CHARACTERS = 44
"""Longer values are cut in the table where both sides agree."""

CHOSEN = frozenset({"protocol", "modes", "digests", "layout"})
"""Fields that may differ as long as both sides have something in common."""


@dataclass(frozen=True, slots=True)
class Row:
    """One compared field."""

    field: str
    decode_value: str
    prefill_value: str
    is_ok: bool


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decode", required=True, metavar="ADDR", help="decode service")
    parser.add_argument("--prefill", required=True, metavar="ADDR", help="prefill service")


def _run(arguments: argparse.Namespace) -> int:
    decode = parse_flag("--decode", target_address, arguments.decode)
    prefill = parse_flag("--prefill", target_address, arguments.prefill)
    with told_failures():
        rows = compare_rows(ask_decode(decode), ask_prefill(prefill))
    print("\n".join(table_lines(rows)))
    num_different = sum(not row.is_ok for row in rows)
    print(f"{len(rows)} fields compared, {num_different} differ")
    return EXIT_FAILED if num_different else EXIT_OK


def ask_decode(target: str) -> Hello:
    """Return what the decode service at `target` would open a session with, but for the slab."""
    from kvspan.client import Client

    with Client(target) as client:
        return hello_of(client.capabilities())


def hello_of(capabilities: DecodeServiceGetCapabilitiesResponse) -> Hello:
    """Return the Hello that a decode service with these capabilities sends; the slab in it is none."""
    from common.wire.convert_identity import identity_from_proto, versions_from_proto
    from common.wire.enums import DIGESTS, MODES

    return Hello(
        versions=versions_from_proto("capabilities.versions", capabilities.versions),
        boot_id=capabilities.boot_id,
        identity=identity_from_proto("capabilities.identity", capabilities.identity),
        modes=MODES.offered("capabilities.modes", capabilities.modes),
        digests=DIGESTS.offered("capabilities.digests", capabilities.digests),
        slab=SlabHandle(name="", size_bytes=0, layout=SPAN_LAYOUT),
    )


def ask_prefill(target: str) -> PrefillOffer:
    """Return what the prefill service at `target` brings to a session."""
    import grpc

    from common.wire.channel import make_sync_channel
    from common.wire.convert import capabilities_from_proto
    from common.wire.failure import remote_failure
    from kvspan.v1 import transfer_pb2
    from kvspan.v1.transfer_pb2_grpc import PrefillServiceStub

    with make_sync_channel(target) as channel:
        try:
            answer = PrefillServiceStub(channel).GetCapabilities(
                transfer_pb2.PrefillServiceGetCapabilitiesRequest(), timeout=CALL_TIME_LIMIT_S
            )
        except grpc.RpcError as error:
            raise remote_failure(error) from error
    return capabilities_from_proto(answer)


def compare_rows(hello: Hello, offer: PrefillOffer) -> tuple[Row, ...]:
    """Return every field that a session would compare, with the judgement of that session."""
    layouts = {"layout": hello.slab.layout}, {"layout": ", ".join(offer.layouts)}
    decode, prefill = _fields_of(hello) | layouts[0], _fields_of(offer) | layouts[1]
    refused = _refused_fields(hello, offer)
    names = [*decode, *(name for name in prefill if name not in decode)]
    return tuple(
        Row(
            name,
            decode.get(name, ABSENT),
            prefill.get(name, ABSENT),
            # Layers are no part of a refusal where their number differs, and have no partners either.
            name not in refused and (name in CHOSEN or decode.get(name) == prefill.get(name)),
        )
        for name in names
    )


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Return the rows under a head, in columns."""
    cells = [("field", "decode", "prefill", "ok")]
    for row in rows:
        cut = partial(excerpt, limit=SHOWN_CHARACTERS) if row.is_ok else str
        cells.append(
            (row.field, cut(row.decode_value), cut(row.prefill_value), "ok" if row.is_ok else "DIFFERS")
        )
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return ["  ".join((*map(str.ljust, line[:3], widths), line[3])) for line in cells]


def _fields_of(side: Hello | PrefillOffer) -> dict[str, str]:
    return {
        "protocol": str(side.versions),
        "modes": ", ".join(mode.value for mode in side.modes),
        "digests": ", ".join(kind.value for kind in side.digests),
        **dict(compared_fields(side.identity)),
    }


def _refused_fields(hello: Hello, offer: PrefillOffer) -> frozenset[str]:
    try:
        negotiate(hello, offer)
    except NegotiationError as error:
        return frozenset(difference.field for difference in error.differences)
    return frozenset()


CHECK = Command("check", "compare a decode and a prefill service field by field", _add_arguments, _run)
