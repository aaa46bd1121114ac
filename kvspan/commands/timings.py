"""One line that says where the time of a request went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.excerpt import printable
from kvspan.commands.values import rounded_size

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from kvspan.v1.decode_pb2 import GenerateResponse

STAGES = ("queued", "waiting", "prefill", "exposed_transfer", "first_token", "decode", "total")
"""Fields of `Timings`; all but the last sum to the last."""


def timings_line(last: GenerateResponse) -> str:
    """Return stages in ms, how much of the transfer was hidden, and token counts, from the last response."""
    timings, usage = last.timings, last.usage
    stages = ", ".join(f"{name} {_milliseconds(getattr(timings, name)):.1f} ms" for name in STAGES)
    num_bytes = rounded_size(timings.num_bytes)
    spans = f"{timings.num_spans_overlapped} of {timings.num_spans} spans ({num_bytes}) overlapped"
    tokens = (
        f"{usage.prompt_tokens} prompt ({usage.cached_tokens} cached) + {usage.generated_tokens} new tokens"
    )
    hidden = "overlap unknown (clock error)" if timings.clock_error else f"overlap {timings.overlap:.0%}"
    return f"{stages} | {_route(last)}, {spans}, {hidden} | {tokens}"


def _milliseconds(duration: Duration) -> float:
    return duration.seconds * 1e3 + duration.nanos / 1e6


def _route(last: GenerateResponse) -> str:
    from kvspan.client import ROUTES, TRANSFERS

    route = next((name for name, number in ROUTES.items() if number == last.timings.route), "unknown")
    mode = next((name for name, number in TRANSFERS.items() if number == last.timings.transfer), "")
    engine = printable(last.prefill_engine.name)
    return " ".join(filter(None, (route, mode, engine and f"by {engine}")))
