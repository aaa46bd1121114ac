"""What a prompt costs in each prefill service and in this process, as measured, and which route is cheaper.

Theory of operation: per place two moving averages, seconds a prompt token and seconds of overhead a prompt
(for a prefill service the exposed transfer). An estimate is

    overhead + (prompt tokens + tokens queued before it) * seconds a token

A place without a measurement has no estimate, and remote is taken then: it is what the pair is for. Local
work takes cores from the lanes that decode, so it has to be cheaper by a clear margin.

Pure. Ownership: one per service, event loop only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.telemetry.timeline import Stages
from decode_service.request import Route

WEIGHT = 0.2
"""Of a new sample in the moving averages: the last ten or so count."""

LOCAL_MARGIN = 0.5
"""Local is chosen when its estimate is below this share of the remote one."""


@dataclass(frozen=True, slots=True)
class PlaceCost:
    """Moving averages of one place, in seconds."""

    token_s: float
    overhead_s: float
    num_samples: int

    def estimate_s(self, num_tokens: int) -> float:
        """Return the seconds until a prompt is published that has `num_tokens` to compute up to its end."""
        return self.overhead_s + num_tokens * self.token_s


class CostModel:
    """Learns from finished prompts."""

    def __init__(self) -> None:
        self._costs: dict[str, PlaceCost] = {}
        # Invariant: keyed by the address of a place, so that its next session goes on with what is known.

    def observe(self, place: str, prompt_len: int, stages: Stages) -> None:
        """Take the stages of a finished request into the averages of its place."""
        token_s = stages.prefill / 1e9 / prompt_len
        overhead_s = stages.exposed_transfer / 1e9
        known = self._costs.get(place)
        if known is None:
            self._costs[place] = PlaceCost(token_s, overhead_s, 1)
            return
        self._costs[place] = PlaceCost(
            known.token_s + WEIGHT * (token_s - known.token_s),
            known.overhead_s + WEIGHT * (overhead_s - known.overhead_s),
            known.num_samples + 1,
        )

    def estimate_s(self, place: str, num_tokens: int) -> float | None:
        """Return the seconds until a prompt is published there; None where nothing was measured.

        `num_tokens` are those to compute up to its end: its own and what is queued before it.
        """
        cost = self._costs.get(place)
        return None if cost is None else cost.estimate_s(num_tokens)


def cheaper(estimates: Mapping[Route, float | None]) -> Route:
    """Return LOCAL when its estimate is below that of REMOTE by the margin, else REMOTE."""
    remote_s, local_s = estimates[Route.REMOTE], estimates[Route.LOCAL]
    is_local = remote_s is not None and local_s is not None and local_s < LOCAL_MARGIN * remote_s
    return Route.LOCAL if is_local else Route.REMOTE
