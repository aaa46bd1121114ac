"""The command `check`: whether two services fit, field by field, and whether they share memory.

Theory of operation: both are asked for their capabilities, and the rule that a session starts with
(`common.session.negotiation`) judges them; this command only prints what that rule compared. What no
capability shows, above all whether prefill sees the slab of decode, only a session does: decode is asked how
its session with this life of prefill stands. A pair without one has not been shown to fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import click

from common.errors import Difference, NegotiationError
from common.excerpt import SHOWN_CHARS, printable
from common.kv.spans import SPAN_LAYOUT
from common.session.identity import NumericsPolicy
from common.session.messages import Hello, SlabHandle
from common.session.negotiation import ABSENT, PrefillOffer, compared_fields, may_differ, negotiate
from common.settings import TARGET
from kvspan.commands.command import EXIT_FAILED, EXIT_OK
from kvspan.commands.remote import call_prefill, told_failures

if TYPE_CHECKING:
    from kvspan.v1.decode_pb2 import DecodeServiceGetCapabilitiesResponse, GetStatusResponse, PeerStatus

CALL_TIME_LIMIT_S = 10.0

SETTLE_LIMIT_S = 5.0
"""How long a session that is being opened is waited for."""

SETTLE_PAUSE_S = 0.2

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
    is_noted: bool = False
    """Whether the values differ and may, since numerics are declared."""


@click.command("check")
@click.option("--decode", type=TARGET, required=True, metavar="ADDR", help="decode service")
@click.option("--prefill", type=TARGET, required=True, metavar="ADDR", help="prefill service")
def check(decode: str, prefill: str) -> int:
    """Compare a decode and a prefill service field by field."""
    with told_failures(prefill):
        offer = ask_prefill(prefill)
    with told_failures(decode):
        capabilities, status = ask_decode(decode, offer.boot_id)
        hello = hello_of(capabilities)
    rows = compare_rows(hello, offer)
    rows += session_rows(status, offer.boot_id, {row.field for row in rows})
    num_different = sum(not row.is_ok for row in rows)
    num_noted = sum(row.is_noted for row in rows)
    counted = f"{len(rows)} fields compared, {num_different} differ"
    counted += f", {num_noted} more may, as numerics are declared" if num_noted else ""
    lengths = lengths_line(capabilities.max_context_tokens, offer.max_prompt_tokens)
    print("\n".join([*table_lines(rows), counted, lengths, *problem_lines(status, offer.boot_id)]))
    return EXIT_FAILED if num_different else EXIT_OK


def ask_decode(
    target: str, prefill_boot_id: str
) -> tuple[DecodeServiceGetCapabilitiesResponse, GetStatusResponse]:
    """Return the capabilities and the status of the decode service at `target`.

    Waits a moment for a session with this life of prefill that is being opened.
    """
    from kvspan.client import Client

    with Client(target) as client:
        return client.capabilities(), settled_status(client.status, prefill_boot_id)


def settled_status(ask: Callable[[], GetStatusResponse], prefill_boot_id: str) -> GetStatusResponse:
    """Return the status once the session with a prefill service is open or refused, or time is up."""
    end_s = time.monotonic() + SETTLE_LIMIT_S
    while True:
        status = ask()
        peer = _peer(status, prefill_boot_id)
        others_open = all(map(_is_open, status.peers))
        is_settled = _is_open(peer) or bool(peer.differences) if peer else others_open
        if is_settled or time.monotonic() >= end_s:
            return status
        time.sleep(SETTLE_PAUSE_S)


def session_rows(status: GetStatusResponse, prefill_boot_id: str, known: set[str]) -> tuple[Row, ...]:
    """Return what the session with this life of prefill shows beside the `known` fields."""
    peer = _peer(status, prefill_boot_id)
    if peer is None:
        return (Row("session", "none", "with this service", is_ok=False),)
    if _is_open(peer):
        return (Row("slab", "made it", "mapped it", is_ok=True),)
    found = tuple(
        Row(one.field, one.decode_value, one.prefill_value, is_ok=False) for one in peer.differences
    )
    if not found:
        return (Row("session", "none", peer.reason, is_ok=False),)
    return tuple(row for row in found if row.field not in known)


def lengths_line(max_context_tokens: int, max_prompt_tokens: int) -> str:
    """Return how long a prompt may be; a difference is none of the pair, each has its own flags."""
    decode, prefill = f"{max_context_tokens} tokens with its answer", f"{max_prompt_tokens} tokens"
    return f"longest prompt: decode takes {decode}, prefill {prefill}"


def problem_lines(status: GetStatusResponse, prefill_boot_id: str) -> list[str]:
    """Return why there is no session; nothing when there is one."""
    peer = _peer(status, prefill_boot_id)
    if peer is not None:
        return [] if _is_open(peer) else [f"no session: {peer.reason}: {peer.problem}"]
    others = ", ".join(f"{one.target} ({one.reason or 'open'})" for one in status.peers)
    return [f"the slab was not tried: decode has no session with this service, only with: {others or 'none'}"]


def _peer(status: GetStatusResponse, prefill_boot_id: str) -> PeerStatus | None:
    """Return the peer that is this life of prefill, whatever address decode reaches it at."""
    return next((peer for peer in status.peers if peer.boot_id == prefill_boot_id), None)


def _is_open(peer: PeerStatus) -> bool:
    from kvspan.v1.decode_pb2 import SESSION_STATE_LEAVING, SESSION_STATE_OPEN

    return peer.state in (SESSION_STATE_OPEN, SESSION_STATE_LEAVING)


def hello_of(capabilities: DecodeServiceGetCapabilitiesResponse) -> Hello:
    """Return the Hello that a decode service with these capabilities sends; the slab in it is none."""
    from common.wire.convert_identity import IDENTITY, VERSIONS
    from common.wire.enums import DIGESTS, MODES, policy_of

    return Hello(
        versions=VERSIONS.read("capabilities.versions", capabilities.versions),
        boot_id=capabilities.boot_id,
        identity=IDENTITY.read("capabilities.identity", capabilities.identity),
        modes=MODES.offered("capabilities.modes", capabilities.modes),
        digests=DIGESTS.offered("capabilities.digests", capabilities.digests),
        slab=SlabHandle(name="", size_bytes=0, layout=SPAN_LAYOUT),
        numerics_policy=policy_of("capabilities.numerics_policy", capabilities.numerics_policy),
    )


def ask_prefill(target: str) -> PrefillOffer:
    """Return what the prefill service at `target` brings to a session."""
    from common.wire.convert import capabilities_from_proto
    from kvspan.v1.transfer_pb2 import PrefillServiceGetCapabilitiesRequest

    request = PrefillServiceGetCapabilitiesRequest()
    answer = call_prefill(target, lambda stub: stub.GetCapabilities(request, timeout=CALL_TIME_LIMIT_S))
    return capabilities_from_proto(answer)


def compare_rows(hello: Hello, offer: PrefillOffer) -> tuple[Row, ...]:
    """Return every field that a session would compare, with the judgement of that session."""
    layouts = {"layout": hello.slab.layout}, {"layout": ", ".join(offer.layouts)}
    decode, prefill = _fields_of(hello) | layouts[0], _fields_of(offer) | layouts[1]
    names = [*decode, *(name for name in prefill if name not in decode)]
    rows = {
        name: Row(
            name,
            decode.get(name, ABSENT),
            prefill.get(name, ABSENT),
            # Layers are no part of a refusal where their number differs, and have no partners either.
            name in CHOSEN or decode.get(name) == prefill.get(name),
        )
        for name in names
    }
    # A difference shows of long values where they differ.
    for one in _refusals(hello, offer):
        rows[one.field] = Row(one.field, one.decode_value, one.prefill_value, is_ok=False)
    if hello.numerics_policy is NumericsPolicy.DECLARED:
        for one in may_differ(hello.identity, offer.identity):
            rows[one.field] = Row(one.field, one.decode_value, one.prefill_value, is_ok=True, is_noted=True)
    return tuple(rows.values())


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Return the rows under a head, in columns."""
    cells = [("field", "decode", "prefill", "ok")]
    for row in rows:
        cut = partial(printable, limit=SHOWN_CHARACTERS if row.is_ok else SHOWN_CHARS)
        cells.append(
            (
                printable(row.field),
                cut(row.decode_value),
                cut(row.prefill_value),
                _verdict(row),
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return ["  ".join((*map(str.ljust, line[:3], widths), line[3])) for line in cells]


def _verdict(row: Row) -> str:
    if not row.is_ok:
        return "DIFFERS"
    return "declared" if row.is_noted else "ok"


def _fields_of(side: Hello | PrefillOffer) -> dict[str, str]:
    return {
        "protocol": str(side.versions),
        "modes": ", ".join(mode.value for mode in side.modes),
        "digests": ", ".join(kind.value for kind in side.digests),
        **dict(compared_fields(side.identity)),
    }


def _refusals(hello: Hello, offer: PrefillOffer) -> Sequence[Difference]:
    try:
        negotiate(hello, offer)
    except NegotiationError as error:
        return error.differences
    return ()
