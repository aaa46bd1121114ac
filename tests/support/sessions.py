"""Builders of messages, peers and machines of one session; every default number is different.

A start of `make_start` fits the spans of `factories.make_span`: transfer 21, attempt 1, slot 7 of
generation 3 at byte 4096.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from common.kv.coverage import Coverage
from common.kv.digest import DigestKind
from common.kv.geometry import KVGeometry
from common.kv.plan import SpanGranularity, plan_spans
from common.kv.ranges import Range
from common.kv.spans import SPAN_LAYOUT, Span
from common.session.actions import DecodeAction, PrefillAction, Send
from common.session.decode_side import DecodeSession
from common.session.identity import EngineFacts, ModelFingerprint, Numerics, PeerIdentity
from common.session.messages import (
    CancelPrefill,
    DecodeMessage,
    GroupTotals,
    Hello,
    PrefillAccepted,
    PrefillDone,
    PrefillMessage,
    SlabHandle,
    SourceTimings,
    SpanSealed,
    StartPrefill,
    TransferMode,
    Welcome,
)
from common.session.negotiation import PROTOCOL_VERSIONS, PrefillOffer
from common.session.prefill_side import PrefillSession
from tests.support.factories import make_geometry

NONCE = bytes(range(32))
GRANULARITY = SpanGranularity(chunk_tokens=2, min_span_bytes=0, max_span_bytes=4096)
TIMINGS = SourceTimings(accepted_ns=100, started_ns=230, ended_ns=370)
PROMPT = (6, 1, 9, 2, 7)
"""Five tokens of a vocabulary of 11."""

SLOT_BYTES = Range(4096, 12_288)


def make_identity(geometry: KVGeometry | None = None) -> PeerIdentity:
    """Return who a peer is; vary it with `dataclasses.replace`."""
    return PeerIdentity(
        model_name="tiny",
        fingerprint=ModelFingerprint(config="c0", weights="3e", tokenizer="70", rounded_weights="5a"),
        config_fields=(("hidden_size", "48"), ("rope_theta", "10000.0")),
        geometry=geometry if geometry is not None else make_geometry(),
        numerics=Numerics(engine="torch-cpu", chunk_tokens=GRANULARITY.chunk_tokens),
        tokenizer_fields=(("chat_template", '"tiny"'),),
    )


def make_hello(identity: PeerIdentity | None = None) -> Hello:
    """Return a Hello that fits `make_offer` of the same identity."""
    return Hello(
        versions=PROTOCOL_VERSIONS,
        boot_id="decode-boot",
        identity=identity if identity is not None else make_identity(),
        modes=tuple(TransferMode),
        digests=(DigestKind.XXH3_64, DigestKind.OFF),
        slab=SlabHandle("slab-of-test", 65_536, SPAN_LAYOUT),
    )


def make_offer(identity: PeerIdentity | None = None) -> PrefillOffer:
    """Return what a prefill service of the same identity brings."""
    return PrefillOffer(
        versions=PROTOCOL_VERSIONS,
        boot_id="prefill-boot",
        identity=identity if identity is not None else make_identity(),
        modes=tuple(TransferMode),
        digests=(DigestKind.OFF, DigestKind.XXH3_64),
        layouts=(SPAN_LAYOUT,),
        granularity=GRANULARITY,
        max_prompt_tokens=13,
        max_concurrency=3,
        engine=EngineFacts("pattern"),
    )


def make_welcome(identity: PeerIdentity | None = None) -> Welcome:
    """Return the Welcome that answers `make_hello`."""
    offer = make_offer(identity)
    return Welcome(
        version=PROTOCOL_VERSIONS.maximum,
        boot_id=offer.boot_id,
        identity=offer.identity,
        modes=offer.modes,
        digest=DigestKind.XXH3_64,
        granularity=offer.granularity,
        max_prompt_tokens=offer.max_prompt_tokens,
        max_concurrency=offer.max_concurrency,
        engine=offer.engine,
        nonce=NONCE,
        longest_step_ms=offer.longest_step_ms,
    )


def make_start(
    transfer_id: int = 21,
    *,
    attempt: int = 1,
    slot: tuple[int, int] = (7, 3),
    slot_bytes: Range = SLOT_BYTES,
    token_ids: tuple[int, ...] = PROMPT,
    first_tokens: tuple[int, ...] = (0,),
) -> StartPrefill:
    """Return a StartPrefill; `slot` is (id, generation)."""
    return StartPrefill(
        transfer_id=transfer_id,
        attempt=attempt,
        slot_id=slot[0],
        generation=slot[1],
        slot_offset=slot_bytes.start,
        slot_size=len(slot_bytes),
        token_ids=token_ids,
        first_tokens=first_tokens,
        mode=TransferMode.STREAM,
        time_limit_s=30.0,
        request_id="name-from-the-client",
    )


def make_coverage(start: StartPrefill, geometry: KVGeometry | None = None) -> Coverage:
    """Return the empty coverage of a transfer."""
    geometry = geometry if geometry is not None else make_geometry()
    slot_bytes = Range(start.slot_offset, start.slot_offset + start.slot_size)
    return Coverage(geometry.groups, start.required, slot_bytes)


def make_spans(
    start: StartPrefill,
    geometry: KVGeometry | None = None,
    granularity: SpanGranularity = GRANULARITY,
) -> list[Span]:
    """Return every span of a transfer in the order of production, none sharing bytes with another."""
    geometry = geometry if geometry is not None else make_geometry()
    plan = plan_spans(geometry, start.required, granularity)
    return [
        Span(
            transfer_id=start.transfer_id,
            attempt=start.attempt,
            slot_id=start.slot_id,
            generation=start.generation,
            sequence=sequence,
            group_index=planned.group_index,
            layers=planned.layers,
            tokens=planned.tokens,
            offset=start.slot_offset + planned.offset,
            length=planned.length,
            digest=b"",
            written_ns=1_000,
            sealed_ns=1_300,
        )
        for sequence, planned in enumerate(plan)
    ]


def make_totals(spans: Iterable[Span], num_groups: int = 1) -> tuple[GroupTotals, ...]:
    """Return what a producer that told these spans says at its end."""
    told = list(spans)
    totals = []
    for group_index in range(num_groups):
        ours = [span for span in told if span.group_index == group_index]
        cells = sum(len(span.layers) * len(span.tokens) for span in ours)
        totals.append(GroupTotals(group_index, len(ours), sum(span.length for span in ours), cells))
    return tuple(totals)


def make_logits(vocab_size: int = 11, **values: float) -> bytes:
    """Return finite logits, except for what is given as `at_<index>=value`."""
    logits = np.arange(vocab_size, dtype="<f4")
    for name, value in values.items():
        logits[int(name.removeprefix("at_"))] = value
    return logits.tobytes()


def make_done(start: StartPrefill, spans: Iterable[Span], geometry: KVGeometry | None = None) -> PrefillDone:
    """Return the PrefillDone of a producer that told exactly these spans."""
    geometry = geometry if geometry is not None else make_geometry()
    return PrefillDone(
        transfer_id=start.transfer_id,
        attempt=start.attempt,
        generation=start.generation,
        totals=make_totals(spans, len(geometry.groups)),
        logits=make_logits(geometry.vocab_size),
        timings=TIMINGS,
    )


def make_open_decode_session() -> DecodeSession:
    """Return a session whose peer was welcomed."""
    session = DecodeSession(make_hello(), NONCE)
    session.greet()
    session.receive(make_welcome())
    return session


def make_open_prefill_session(offer: PrefillOffer | None = None) -> PrefillSession:
    """Return a session that has sent Welcome."""
    session = PrefillSession(offer if offer is not None else make_offer())
    session.receive(make_hello())
    session.attached(NONCE)
    return session


def sent(actions: Iterable[object]) -> list[DecodeMessage | PrefillMessage]:
    """Return the messages that these actions put on the stream, in order."""
    return [action.message for action in actions if isinstance(action, Send)]


def renamed(start: StartPrefill, transfer_id: int, slot_bytes: Range) -> StartPrefill:
    """Return the same prompt as another transfer in another slot."""
    return replace(
        start,
        transfer_id=transfer_id,
        slot_id=start.slot_id + 1,
        slot_offset=slot_bytes.start,
        slot_size=len(slot_bytes),
    )


START = make_start()
OTHER = renamed(START, 22, Range(16_384, 20_480))
SPANS = make_spans(START)
"""Six: chunks of 2, 2 and 1 tokens, one span per layer."""


def begin(session: DecodeSession, start: StartPrefill = START) -> None:
    """Start a transfer and have it accepted."""
    session.begin(start, make_coverage(start))
    session.receive(PrefillAccepted(start.transfer_id, start.attempt, 0))


def tell(session: DecodeSession, start: StartPrefill = START) -> None:
    """Have every span of a transfer told, and its end."""
    spans = make_spans(start)
    for span in spans:
        session.receive(SpanSealed(span))
    session.receive(make_done(start, spans))


def finish_imports(session: DecodeSession, start: StartPrefill = START) -> tuple[DecodeAction, ...]:
    """End every copy of a transfer well; return the actions of the last one."""
    return [session.import_finished(start.transfer_id, span.sequence) for span in make_spans(start)][-1]


def make_queued_job() -> PrefillSession:
    """Return an open session with job 21 in the queue."""
    session = make_open_prefill_session()
    session.receive(START)
    return session


def make_running_job() -> PrefillSession:
    """Return an open session whose engine works on job 21."""
    session = make_queued_job()
    assert session.engine_started(21)
    return session


def make_stopping_job() -> PrefillSession:
    """Return an open session whose engine was told to stop job 21."""
    session = make_running_job()
    session.receive(CancelPrefill(21, 1, "REQUEST_CANCELLED"))
    return session


def finish_job(session: PrefillSession) -> tuple[PrefillAction, ...]:
    """End job 21 well."""
    return session.engine_finished(21, make_totals(SPANS), make_logits(), TIMINGS)
