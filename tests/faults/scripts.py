"""Everything a peer can do wrong, one at a time: the scripts of `HostilePrefill`.

Theory of operation: a script changes the honest messages: PrefillAccepted, then the spans, then PrefillDone.
A lie about one transfer fails it and nothing else; what the session does not allow ends the session; what is
late, repeated or unknown is counted and ignored, until there is too much of it. OK means that the answer came
(over a KV of zeros), EXACT that decode did not trust this peer and asked the other one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from common.slab.segment import SlabSegment
from kvspan.v1 import transfer_pb2 as pb
from tests.faults.faults import EXACT, LATE, LOST
from tests.faults.hostile import NO_MESSAGE, NO_TEXT, Change, Messages, Script
from tests.support.memories import can_truncate, descriptor_of, punch

PROTOCOL = "FAILED_PRECONDITION PROTOCOL_VIOLATION_REMOTE"
HOUR_NS = 3600 * 10**9
FLOOD = 4_000
"""Messages; as many copies of a span would be a hundred megabytes if they were kept."""

MANY = 900
"""Messages without meaning that a session bears."""


def _copy(message: pb.TransferResponse) -> pb.TransferResponse:
    copied = pb.TransferResponse()
    copied.CopyFrom(message)
    return copied


def span(change: Callable[[pb.KVSpan], object], index: int = 2) -> Change:
    """Change one span."""

    def changed(messages: Messages) -> Messages:
        change(messages[1 + index].kv_span)
        return messages

    return changed


def sets(**values: int) -> Change:
    """Set fields of one span; `a__b` names a field of a field."""

    def change(told: pb.KVSpan) -> None:
        for name, value in values.items():
            owner, _, field = name.rpartition("__")
            setattr(getattr(told, owner) if owner else told, field, value)

    return span(change)


def done(change: Callable[[pb.PrefillDone], object]) -> Change:
    """Change PrefillDone."""

    def changed(messages: Messages) -> Messages:
        change(messages[-1].prefill_done)
        return messages

    return changed


def welcome(change: Callable[[pb.Welcome], object]) -> Change:
    """Change Welcome."""

    def changed(messages: Messages) -> Messages:
        change(messages[0].welcome)
        return messages

    return changed


def _unlike(messages: Messages, **values: int) -> pb.TransferResponse:
    """Return a copy of the first span with other fields."""
    copied = _copy(messages[1])
    for name, value in values.items():
        setattr(copied.kv_span, name, value)
    return copied


def _set_float(told: pb.PrefillDone, value: float) -> None:
    told.logits = struct.pack("<f", value) + told.logits[4:]


def _merge(told: pb.KVSpan) -> None:
    told.tokens.start, told.tokens.stop = 0, 1 << 40


def _set(message: object, **values: object) -> None:
    for name, value in values.items():
        setattr(message, name, value)


def _shift(told: pb.KVSpan, num_bytes: int) -> None:
    told.offset += num_bytes


def _lengthen(told: pb.KVSpan, num_bytes: int) -> None:
    told.length += num_bytes


def _digest(told: pb.KVSpan, value: bytes) -> None:
    told.digest = value


def _cut(told: pb.PrefillDone) -> None:
    told.logits = told.logits[:-4]


def _absurd(told: pb.Welcome) -> None:
    told.granularity.max_span_bytes = 0
    told.granularity.chunk_tokens = 0


def _shift_times(told: pb.PrefillDone, by_ns: int) -> None:
    for field, moment_ns in told.timings.ListFields():
        setattr(told.timings, field.name, moment_ns + by_ns)


def _swap_times(told: pb.PrefillDone) -> None:
    told.timings.ended_ns = told.timings.started_ns - 1


def _cancelled(messages: Messages) -> pb.TransferResponse:
    accepted = messages[0].prefill_accepted
    ended = pb.PrefillCancelled(transfer_id=accepted.transfer_id, attempt=accepted.attempt)
    return pb.TransferResponse(prefill_cancelled=ended)


def _truncate(slab: SlabSegment) -> None:
    """Try to end decode by SIGBUS."""
    assert not can_truncate(descriptor_of(slab))


def _punch(slab: SlabSegment) -> None:
    """Take all of the memory away, the header too."""
    punch(descriptor_of(slab), 0, slab.size_bytes)


def _unlike_span(messages: Messages) -> pb.TransferResponse:
    """Return a span with a number and bytes of its own over cells that were told."""
    return _unlike(messages, sequence=500, offset=messages[2].kv_span.offset)


def with_gap(messages: Messages) -> Messages:
    """Leave a span out and tell totals that agree with that."""
    left_out, ended = messages[3].kv_span, messages[-1].prefill_done
    total = ended.totals[left_out.group_index]
    total.num_spans -= 1
    total.num_bytes -= left_out.length
    cells = (left_out.layers.stop - left_out.layers.start) * (left_out.tokens.stop - left_out.tokens.start)
    total.layer_tokens -= cells
    return [*messages[:3], *messages[4:]]


def _welcome_again() -> pb.TransferResponse:
    return pb.TransferResponse(welcome=pb.Welcome(version=1, boot_id="again"))


FAILED = pb.TransferResponse(
    prefill_failed=pb.PrefillFailed(transfer_id=1, attempt=1, reason="ENGINE_FAILED", message="so it says")
)


def _end_of_second(messages: Messages) -> Messages:
    """Return PrefillDone of the second prompt of a session alone."""
    return messages[-1:] if messages[0].prefill_accepted.transfer_id == 2 else []


UNDRAINED = Script("first never drains", "OK", lambda m: m[:-1], late=_end_of_second)
"""The first prompt never ends, the second one late."""

SCRIPTS = (
    Script("honest", "OK"),
    # Spans that lie about what they are.
    Script("span of an unknown transfer", "DATA_LOSS TOTALS_MISMATCH", sets(transfer_id=99)),
    Script("span of another attempt", "DATA_LOSS STALE_GENERATION", sets(attempt=2)),
    Script("span of an old generation", "DATA_LOSS STALE_GENERATION", sets(generation=77)),
    Script("span of another slot", "DATA_LOSS SPAN_OUT_OF_RANGE", sets(slot_id=5)),
    Script("span of an unknown group", "DATA_LOSS SPAN_OUT_OF_RANGE", sets(group_index=9)),
    Script("layers beyond the model", "DATA_LOSS SPAN_OUT_OF_RANGE", sets(layers__stop=99)),
    Script("layers the wrong way round", LOST, sets(layers__start=3, layers__stop=1)),
    Script("tokens beyond the prompt", "DATA_LOSS SPAN_OUT_OF_RANGE", sets(tokens__stop=4000)),
    Script("tokens beyond any number", "DATA_LOSS SPAN_OUT_OF_RANGE", span(_merge)),
    Script("offset before the slot", "DATA_LOSS SPAN_OUT_OF_RANGE", sets(offset=0)),
    Script("offset beyond the slab", "DATA_LOSS SPAN_OUT_OF_RANGE", sets(offset=1 << 40)),
    Script("offset that is not aligned", "DATA_LOSS SPAN_OUT_OF_RANGE", span(lambda s: _shift(s, 4))),
    Script("length too short", "DATA_LOSS SPAN_OUT_OF_RANGE", span(lambda s: _lengthen(s, -64))),
    Script("length beyond the slab", "DATA_LOSS SPAN_OUT_OF_RANGE", sets(length=1 << 50)),
    Script("digest of other bytes", "DATA_LOSS KV_CHECKSUM", span(lambda s: _digest(s, b"12345678"))),
    Script("digest of another length", "DATA_LOSS KV_CHECKSUM", span(lambda s: _digest(s, b"123"))),
    # What it does to the memory.
    Script("slab cut and stretched", "OK", harm=_truncate),
    Script("hole in a slab", "DATA_LOSS KV_CHECKSUM", fill=1, harm=_punch),
    Script("hole where zeros belong", "OK", harm=_punch),
    # Spans that do not fit together.
    Script("cells told twice", "DATA_LOSS SPAN_OVERLAP", lambda m: [*m[:3], _unlike_span(m), *m[3:]]),
    Script("sequence used twice", "DATA_LOSS SPAN_OUT_OF_RANGE", sets(sequence=0)),
    Script("exact duplicate", "OK", lambda m: [m[0], m[1], *m[1:]]),
    Script("a gap", "DATA_LOSS TOTALS_MISMATCH", lambda m: [*m[:3], *m[4:]]),
    Script("a gap and totals of it", "DATA_LOSS COVERAGE_INCOMPLETE", with_gap),
    Script("nothing but the end", "DATA_LOSS TOTALS_MISMATCH", lambda m: [m[0], m[-1]]),
    Script("spans in reverse", "OK", lambda m: [m[0], *m[-2:0:-1], m[-1]]),
    # Ends that lie.
    Script("done of another generation", "DATA_LOSS STALE_GENERATION", done(lambda d: _set(d, generation=9))),
    Script("done of another attempt", "DATA_LOSS STALE_GENERATION", done(lambda d: _set(d, attempt=3))),
    Script("totals too many", "DATA_LOSS TOTALS_MISMATCH", done(lambda d: _set(d.totals[0], num_spans=99))),
    Script(
        "totals of other bytes", "DATA_LOSS TOTALS_MISMATCH", done(lambda d: _set(d.totals[0], num_bytes=1))
    ),
    Script("totals left out", "DATA_LOSS TOTALS_MISMATCH", done(lambda d: d.ClearField("totals"))),
    Script("logits too few", "DATA_LOSS LOGITS_INVALID", done(_cut)),
    Script("logits not a number", "DATA_LOSS LOGITS_INVALID", done(lambda d: _set_float(d, float("nan")))),
    Script("logits without bound", "DATA_LOSS LOGITS_INVALID", done(lambda d: _set_float(d, float("inf")))),
    Script("done twice", "OK", lambda m: [*m, _copy(m[-1])], is_held=True),
    Script("span after done", "OK", lambda m: [*m, _copy(m[1])]),
    Script("failed after done", "OK", lambda m: [*m, FAILED], is_held=True),
    Script("cancelled after done", "OK", lambda m: [*m, _cancelled(m)], is_held=True),
    Script("no message after done", "OK", lambda m: [*m, NO_MESSAGE], is_held=True),
    # Times that cannot be true.
    Script("times below zero", "OK", sets(written_ns=-5), lies_about_time=True),
    Script("no times", "OK", done(lambda d: d.ClearField("timings")), lies_about_time=True),
    Script("times of an hour ago", "OK", done(lambda d: _shift_times(d, -HOUR_NS)), lies_about_time=True),
    Script("times in an hour", "OK", done(lambda d: _shift_times(d, HOUR_NS)), lies_about_time=True),
    Script("times swapped", "OK", done(_swap_times), lies_about_time=True),
    Script("cancelled unasked for", "INTERNAL PREFILL_FAILED", lambda m: [*m[:4], _cancelled(m)]),
    Script("accepted twice", PROTOCOL, lambda m: [m[0], m[0], *m[1:]]),
    Script("never accepted", PROTOCOL, lambda m: m[1:]),
    Script("silent about a prompt", LATE[0], lambda m: m[:1], LATE[1], time_limit_s=1.0),
    Script("never ends", LATE[0], lambda m: m[:-1], LATE[1], time_limit_s=1.0),
    Script("many duplicates", "OK", lambda m: [*m[:2], *[m[1]] * MANY, *m[2:]]),
    Script("flood of duplicates", LOST, lambda m: [*m[:2], *[m[1]] * FLOOD, *m[2:]]),
    Script("flood of unknown spans", LOST, lambda m: [m[0], *[_unlike(m, transfer_id=88)] * FLOOD, *m[1:]]),
    Script(
        "flood of pongs",
        LOST,
        lambda m: [m[0], *[pb.TransferResponse(pong=pb.Pong(number=7))] * FLOOD, *m[1:]],
    ),
    # Sessions.
    Script("welcome twice", LOST, lambda m: [m[0], _welcome_again(), *m[1:]]),
    Script("bytes that are no message", LOST, lambda m: [m[0], NO_MESSAGE, *m[1:]]),
    Script("text that is no UTF-8", LOST, lambda m: [m[0], NO_TEXT, *m[1:]]),
    Script("no message for a welcome", EXACT, greet=lambda m: [NO_MESSAGE], problem="cannot be read"),
    Script("message of nothing", LOST, lambda m: [m[0], pb.TransferResponse(), *m[1:]]),
    Script("message before welcome", EXACT, greet=lambda m: [FAILED, *m], problem="Welcome comes first"),
    Script(
        "welcome of another nonce", EXACT, greet=welcome(lambda w: _set(w, nonce=bytes(32))), problem="nonce"
    ),
    Script(
        "welcome of another version", EXACT, greet=welcome(lambda w: _set(w, version=9)), problem="protocol"
    ),
    Script(
        "welcome without an identity",
        EXACT,
        greet=welcome(lambda w: w.ClearField("identity")),
        problem="identity",
    ),
    Script(
        "welcome without a boot id", EXACT, greet=welcome(lambda w: _set(w, boot_id="")), problem="boot_id"
    ),
    Script("welcome with absurd sizes", EXACT, greet=welcome(_absurd), problem="granularity"),
    Script("no welcome", EXACT, greet=lambda m: [], problem="no Welcome"),
)
"""In the order in which they are played on one pair of services."""
