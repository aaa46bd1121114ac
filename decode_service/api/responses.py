"""Tokens and timings as messages of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from google.protobuf.duration_pb2 import Duration

from common.telemetry.timeline import Timeline
from common.wire.enums import MODES
from decode_service.generate.answer import FinishReason, TokenEvent
from decode_service.generate.sampling import SampledToken
from decode_service.request import Request, Route
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import geometry_pb2

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}

ROUTES = {Route.REMOTE: pb.ROUTE_REMOTE, Route.LOCAL: pb.ROUTE_LOCAL, Route.AUTO: pb.ROUTE_AUTO}


def token_response(events: Sequence[TokenEvent], *, with_logprobs: bool) -> pb.GenerateResponse:
    """Return the message for tokens that are sent together."""
    response = pb.GenerateResponse(
        token_ids=[event.sampled.token_id for event in events],
        text="".join(event.text for event in events),
    )
    if with_logprobs:
        response.logprobs.extend(_position(event.sampled) for event in events)
    return response


def last_response(
    response: pb.GenerateResponse,
    finish: FinishReason,
    request: Request,
    num_tokens: int,
    timeline: Timeline,
) -> None:
    """Add to the last message why the answer ended, and its counts and stages."""
    response.finish_reason = FINISH_REASONS[finish]
    response.usage.CopyFrom(pb.Usage(prompt_tokens=request.prompt_len, generated_tokens=num_tokens))
    response.timings.CopyFrom(_timings(request, timeline))
    engine = pb.PrefillEngine(name=timeline.engine, numerics=timeline.numerics)
    response.prefill_engine.CopyFrom(engine)


def _timings(request: Request, timeline: Timeline) -> pb.Timings:
    return pb.Timings(
        **{stage: _duration(length_ns) for stage, length_ns in asdict(timeline.stages()).items()},
        overlap=timeline.overlap,
        num_spans=len(timeline.spans),
        num_spans_overlapped=timeline.num_spans_overlapped,
        num_bytes=sum(record.num_bytes for record in timeline.spans),
        route=ROUTES[Route.LOCAL if timeline.is_local else Route.REMOTE],
        clock_error=timeline.has_clock_error,
        transfer=geometry_pb2.TRANSFER_MODE_UNSPECIFIED if timeline.is_local else MODES.number(request.mode),
    )


def _duration(nanoseconds: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(nanoseconds)
    return duration


def _position(sampled: SampledToken) -> pb.PositionLogprobs:
    top = [pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in sampled.top]
    chosen = pb.TokenLogprob(token_id=sampled.token_id, logprob=sampled.logprob)
    return pb.PositionLogprobs(chosen=chosen, top=top)
