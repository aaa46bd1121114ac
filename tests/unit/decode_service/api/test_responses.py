"""Tokens and timings as messages of the contract."""

import pytest

from common.session.messages import TransferMode
from common.telemetry.timeline import SpanRecord, Timeline
from decode_service.api.responses import last_response, token_response
from decode_service.generate.answer import FinishReason, TokenEvent
from decode_service.generate.sampling import SampledToken
from decode_service.request import Route
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import geometry_pb2
from tests.support.decoding import make_request

FIRST = TokenEvent(SampledToken(7, -0.5, ((7, -0.5), (9, -1.5))), "He", None)
SECOND = TokenEvent(SampledToken(8, -0.25, ((8, -0.25),)), "llo", FinishReason.LENGTH)
SPANS = [SpanRecord(0, 640, 1, 2, 300, 400), SpanRecord(1, 64, 1, 2, 650, 750)]


def make_last(route: Route, finish: FinishReason = FinishReason.LENGTH) -> pb.GenerateResponse:
    """Return the last message of a request of three tokens' prompt."""
    response = pb.GenerateResponse()
    timeline = Timeline(100, 130, 200, 700, 750, 757, 1000, list(SPANS) if route is Route.REMOTE else [])
    timeline.is_local = route is Route.LOCAL
    request = make_request("abc", route=route, mode=TransferMode.WHOLE)
    last_response(response, finish, request, 5, timeline)
    return response


def test_tokens_that_came_together_are_one_message() -> None:
    """Ids in order and the text joined."""
    response = token_response([FIRST, SECOND], with_logprobs=False)

    assert response == pb.GenerateResponse(token_ids=[7, 8], text="Hello")


def test_log_probabilities_are_one_entry_a_token() -> None:
    """Also for the first token, which no step computed (F7)."""
    response = token_response([FIRST, SECOND], with_logprobs=True)

    assert [(one.chosen.token_id, one.chosen.logprob) for one in response.logprobs] == [(7, -0.5), (8, -0.25)]
    assert [[top.token_id for top in one.top] for one in response.logprobs] == [[7, 9], [8]]


@pytest.mark.parametrize(
    ("finish", "number"),
    [(FinishReason.STOP, pb.FINISH_REASON_STOP), (FinishReason.LENGTH, pb.FINISH_REASON_LENGTH)],
)
def test_the_last_message_says_why_and_how_much(finish: FinishReason, number: pb.FinishReason) -> None:
    """Tokens generated are tokens sent (F9)."""
    response = make_last(Route.REMOTE, finish)

    assert response.finish_reason == number
    assert response.usage == pb.Usage(prompt_tokens=3, generated_tokens=5)


@pytest.mark.parametrize("has_clock_error", [False, True])
def test_a_clock_error_of_the_source_is_marked(has_clock_error: bool) -> None:
    """A client must know that stages and overlap are not the source's (Y25)."""
    response, timeline = pb.GenerateResponse(), Timeline(100, 130, 200, 700, 750, 757, 1000)
    timeline.has_clock_error = has_clock_error

    last_response(response, FinishReason.STOP, make_request("abc"), 5, timeline)

    assert response.timings.clock_error is has_clock_error


def test_stages_sum_to_the_total() -> None:
    """Exactly: durations carry nanoseconds (M4)."""
    timings = make_last(Route.REMOTE).timings
    stages = ("queued", "waiting", "prefill", "exposed_transfer", "first_token", "decode")
    durations = [getattr(timings, stage).ToNanoseconds() for stage in stages]

    assert durations == [30, 70, 500, 50, 7, 243]
    assert timings.total.ToNanoseconds() == sum(durations)


def test_a_remote_prompt_tells_its_transfer() -> None:
    """Spans, bytes, overlap and mode."""
    timings = make_last(Route.REMOTE).timings

    assert (timings.num_spans, timings.num_spans_overlapped, timings.num_bytes) == (2, 1, 704)
    assert timings.overlap == 0.75
    assert (timings.route, timings.transfer) == (pb.ROUTE_REMOTE, geometry_pb2.TRANSFER_MODE_WHOLE)


def test_a_local_prompt_has_no_transfer() -> None:
    """Nothing crossed, whatever mode was asked for."""
    timings = make_last(Route.LOCAL).timings

    assert (timings.route, timings.transfer) == (pb.ROUTE_LOCAL, geometry_pb2.TRANSFER_MODE_UNSPECIFIED)
    assert (timings.num_spans, timings.num_bytes, timings.overlap) == (0, 0, 0.0)
