"""The line of timings names every stage and how much of the transfer was hidden."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvspan.commands.timings import STAGES, timings_line
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import geometry_pb2


def test_line_has_every_stage_in_milliseconds() -> None:
    """Stages are durations in ms; route, spans, bytes and token counts follow."""
    durations: dict[str, Any] = {
        name: Duration(nanos=(7 + index) * 100_000) for index, name in enumerate(STAGES)
    }
    timings = pb.Timings(
        **durations,
        overlap=0.75,
        num_spans=5,
        num_spans_overlapped=4,
        num_bytes=3 << 20,
        route=pb.ROUTE_REMOTE,
        transfer=geometry_pb2.TRANSFER_MODE_STREAM,
    )
    usage = pb.Usage(prompt_tokens=11, cached_tokens=2, generated_tokens=13)

    engine = pb.PrefillEngine(name="fixed-width", numerics="npu 3")

    line = timings_line(pb.GenerateResponse(timings=timings, usage=usage, prefill_engine=engine))

    assert line == (
        "queued 0.7 ms, waiting 0.8 ms, prefill 0.9 ms, exposed_transfer 1.0 ms, first_token 1.1 ms, "
        "decode 1.2 ms, total 1.3 ms | remote stream by fixed-width, 4 of 5 spans (3.0 MiB) overlapped, "
        "overlap 75% | 11 prompt (2 cached) + 13 new tokens"
    )


def test_line_says_when_the_prefill_service_has_another_clock() -> None:
    """A share of zero would be taken for a measurement."""
    line = timings_line(pb.GenerateResponse(timings=pb.Timings(clock_error=True)))

    assert "overlap unknown (clock error)" in line


def test_stages_are_the_durations_of_the_contract() -> None:
    """A stage that the contract gains shows here."""
    fields = pb.Timings.DESCRIPTOR.fields
    durations = [field.name for field in fields if field.message_type is Duration.DESCRIPTOR]

    assert tuple(durations) == STAGES
