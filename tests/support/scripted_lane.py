"""A lane for the scheduler whose tokens, or faults, are written down beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.engine.decode import LaneStep
from common.engine.prefill import Logits
from decode_service.generate.answer import FinishReason, TokenEvent
from decode_service.generate.sampling import SampledToken


@dataclass(slots=True, eq=False)
class ScriptedLane:
    """A `Lane` that generates `num_tokens` tokens and keeps the rows it was given."""

    name: str
    num_tokens: int = 4
    cannot_step: bool = False
    cannot_sample: bool = False
    sampling_error: BaseException = field(default_factory=lambda: ValueError("no numbers"))
    is_cancelled: bool = False
    rows: list[object] = field(default_factory=list)
    taken: int = 0

    def first(self) -> TokenEvent:
        """See `Lane`."""
        assert self.taken == 0
        return self._token()

    def lane_step(self) -> LaneStep:
        """See `Lane`."""
        if self.cannot_step:
            raise KeyError(f"{self.name} has no row")
        return LaneStep(ord(self.name), self.taken, ())

    def accept(self, logits_V: Logits) -> TokenEvent:
        """See `Lane`."""
        if self.cannot_sample:
            raise self.sampling_error
        self.rows.append(logits_V)
        return self._token()

    def _token(self) -> TokenEvent:
        self.taken += 1
        finish = FinishReason.LENGTH if self.taken >= self.num_tokens else None
        return TokenEvent(SampledToken(self.taken, None, ()), "", finish)
