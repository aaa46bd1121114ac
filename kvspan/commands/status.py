"""The command `status`: what a decode or a prefill service is doing now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from common.excerpt import printable
from common.settings import TARGET
from kvspan.commands.command import EXIT_OK
from kvspan.commands.counts import own_lines, unusual
from kvspan.commands.generate import DEFAULT_TARGET
from kvspan.commands.prefill_status import ask_prefill_status, prefill_status_lines
from kvspan.commands.remote import told_failures
from kvspan.commands.values import rounded_size

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kvspan.v1.decode_pb2 import GetStatusResponse, PeerStatus


SHOWN_DIFFERENCES_CHARS = 1000
"""Of what differs from one prefill service; `--json` has all of it."""


@click.command("status")
@click.option(
    "--target",
    type=TARGET,
    default=DEFAULT_TARGET,
    metavar="ADDR",
    show_default=True,
    help="decode or prefill service",
)
@click.option("--json", "as_json", is_flag=True, help="print one line of JSON, zeros included")
def status(target: str, as_json: bool) -> int:
    """Tell what a decode or a prefill service is doing now."""
    from google.protobuf.json_format import MessageToJson

    with told_failures(target):
        answer, lines = _ask(target)
    if as_json:
        print(
            MessageToJson(
                answer,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
                indent=None,
            )
        )
    else:
        print("\n".join(lines))
    return EXIT_OK


def _ask(target: str) -> tuple[Message, Iterator[str]]:
    """Return the status of whichever service is at `target`, and how it reads."""
    from common.wire.failure import RemoteFailure
    from kvspan.client import Client

    try:
        with Client(target) as client:
            decode = client.status()
        return decode, status_lines(decode)
    except RemoteFailure as failure:
        # A server that does not know the decode service is a prefill service, or neither.
        if failure.code.name != "UNIMPLEMENTED":
            raise
    prefill = ask_prefill_status(target)
    return prefill, prefill_status_lines(prefill)


def status_lines(status: GetStatusResponse) -> Iterator[str]:
    """Yield the status for people: service, requests, then one line per group and peer."""
    held, requests = status.reservations, status.requests
    lanes = f"{status.lanes_used} of {status.lanes_total} lanes"
    yield f"boot {status.boot_id}: {lanes} used, {status.num_steps} steps, {status.num_tokens} tokens"
    yield (
        f"now: {held.queued} queued (limit {status.queue_limit}), {held.transferring} transferring, "
        f"{held.decoding} decoding, {held.draining} draining"
    )
    yield (
        f"requests: {requests.submitted} submitted, {requests.finished} finished, {requests.failed} failed, "
        f"{requests.cancelled} cancelled, {requests.refused} refused"
        + unusual((requests.queue_full, "of them by a full queue"), (requests.retried, "attempts repeated"))
    )
    yield f"prompts: {status.prompts_remote} remote, {status.prompts_local} local"
    for group in status.groups:
        pages = f"{group.used_pages} of {group.total_pages} pages"
        yield f"group {group.group_index}: {pages} of {rounded_size(group.page_bytes)} used"
    yield from _peer_lines(status)
    yield from own_lines(status)


def _peer_lines(status: GetStatusResponse) -> Iterator[str]:
    from kvspan.v1.decode_pb2 import SessionState

    for peer in status.peers:
        state = SessionState.Name(peer.state).removeprefix("SESSION_STATE_").lower()
        slab = f"{rounded_size(peer.slab_leased_bytes)} of {rounded_size(peer.slab_total_bytes)} leased"
        line = f"peer {peer.target}: {state}, {peer.num_transfers} transfers, {peer.num_slots} slots, {slab}"
        yield line + unusual(
            (peer.num_clock_errors, "clock errors"),
            (peer.num_late_events, "late events"),
            (peer.num_unknown_messages, "unknown messages"),
            (peer.num_duplicate_spans, "duplicate spans"),
        )
        if peer.reason:
            yield f"  no session: {peer.reason}: {peer.problem}"
        elif peer.HasField("engine"):
            yield f"  engine: {_engine(peer)}"


def _engine(peer: PeerStatus) -> str:
    """Return what computes at a peer, and in what it computes otherwise than decode would."""
    from kvspan.v1.geometry_pb2 import EngineOrigin

    origin = EngineOrigin.Name(peer.engine.origin).removeprefix("ENGINE_ORIGIN_").lower()
    told = "; ".join(
        f"{one.field}: {one.decode_value} here, {one.prefill_value} there" for one in peer.differences
    )
    differs = f", differs in {printable(told, SHOWN_DIFFERENCES_CHARS)}" if told else ""
    return f"{printable(peer.engine.name)} ({origin}){differs}"
