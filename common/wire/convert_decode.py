"""Messages from decode to prefill, to and from their wire form."""

from __future__ import annotations

from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    Hello,
    Ping,
    ReleaseSpan,
    SlabHandle,
    StartPrefill,
)
from common.wire import fields
from common.wire.convert_identity import (
    identity_from_proto,
    identity_to_proto,
    versions_from_proto,
    versions_to_proto,
)
from common.wire.enums import DIGESTS, LAYOUTS, MODES, layout_name
from common.wire.fields import MAX_TEXT_CHARS, at_least, malformed, remark, require_set, require_short, text
from kvspan.v1 import transfer_pb2 as pb


def decode_message_to_proto(message: DecodeMessage) -> pb.TransferRequest:
    """Return the wire form of a message of decode."""
    match message:
        case ReleaseSpan(transfer_id, attempt, sequence):
            release = pb.ReleaseSpan(transfer_id=transfer_id, attempt=attempt, sequence=sequence)
            return pb.TransferRequest(release_span=release)
        case StartPrefill():
            return pb.TransferRequest(start_prefill=_start_to_proto(message))
        case CancelPrefill(transfer_id, attempt, cause):
            cancel = pb.CancelPrefill(transfer_id=transfer_id, attempt=attempt, cause=cause)
            return pb.TransferRequest(cancel_prefill=cancel)
        case Ping(number):
            return pb.TransferRequest(ping=pb.Ping(number=number))
        case Hello():
            return pb.TransferRequest(hello=_hello_to_proto(message))


def _hello_to_proto(hello: Hello) -> pb.Hello:
    return pb.Hello(
        versions=versions_to_proto(hello.versions),
        boot_id=hello.boot_id,
        identity=identity_to_proto(hello.identity),
        modes=[MODES.number(mode) for mode in hello.modes],
        digests=[DIGESTS.number(kind) for kind in hello.digests],
        slab=pb.SlabHandle(
            name=hello.slab.name,
            size_bytes=hello.slab.size_bytes,
            layout=LAYOUTS.number(hello.slab.layout),
        ),
    )


def _start_to_proto(start: StartPrefill) -> pb.StartPrefill:
    return pb.StartPrefill(
        transfer_id=start.transfer_id,
        attempt=start.attempt,
        slot_id=start.slot_id,
        generation=start.generation,
        slot_offset=start.slot_offset,
        slot_size=start.slot_size,
        token_ids=start.token_ids,
        first_token=start.first_token,
        mode=MODES.number(start.mode),
        time_limit=fields.duration(start.time_limit_s),
        request_id=start.request_id,
    )


def decode_message_from_proto(request: pb.TransferRequest) -> DecodeMessage:
    """Return the message that decode sent.

    Raises: `RemoteProtocolError` when no message is set or a field of it is malformed.
    """
    match request.WhichOneof("message"):
        case "release_span":
            release = request.release_span
            attempt = at_least("release_span.attempt", release.attempt, 1)
            return ReleaseSpan(release.transfer_id, attempt, release.sequence)
        case "start_prefill":
            return _start_from_proto(request.start_prefill)
        case "cancel_prefill":
            cancel = request.cancel_prefill
            attempt = at_least("cancel_prefill.attempt", cancel.attempt, 1)
            return CancelPrefill(cancel.transfer_id, attempt, remark(cancel.cause))
        case "ping":
            return Ping(request.ping.number)
        case "hello":
            return _hello_from_proto(request.hello)
        case _:
            raise malformed("transfer_request.message", None, "must be set")


def _hello_from_proto(hello: pb.Hello) -> Hello:
    for part in ("versions", "identity", "slab"):
        require_set(f"hello.{part}", hello.HasField(part))
    return Hello(
        versions=versions_from_proto("hello.versions", hello.versions),
        boot_id=text("hello.boot_id", hello.boot_id),
        identity=identity_from_proto("hello.identity", hello.identity),
        modes=MODES.offered("hello.modes", hello.modes),
        digests=DIGESTS.offered("hello.digests", hello.digests),
        slab=SlabHandle(
            name=_file_name("hello.slab.name", hello.slab.name),
            size_bytes=at_least("hello.slab.size_bytes", hello.slab.size_bytes, 1),
            layout=layout_name("hello.slab.layout", hello.slab.layout),
        ),
    )


def _start_from_proto(start: pb.StartPrefill) -> StartPrefill:
    require_set("start_prefill.time_limit", start.HasField("time_limit"))
    return StartPrefill(
        transfer_id=start.transfer_id,
        attempt=at_least("start_prefill.attempt", start.attempt, 1),
        slot_id=start.slot_id,
        generation=start.generation,
        slot_offset=at_least("start_prefill.slot_offset", start.slot_offset, 0),
        slot_size=at_least("start_prefill.slot_size", start.slot_size, 0),
        token_ids=tuple(start.token_ids),
        first_token=start.first_token,
        mode=MODES.native("start_prefill.mode", start.mode),
        time_limit_s=fields.seconds("start_prefill.time_limit", start.time_limit),
        request_id=remark(start.request_id),
    )


def _file_name(field: str, name: str) -> str:
    """Return a name that stays inside its directory."""
    require_short(field, name, MAX_TEXT_CHARS, "characters")
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise malformed(field, name, "must be a file name without a directory")
    return name
