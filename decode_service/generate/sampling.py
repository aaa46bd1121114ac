"""Pick the next token of one sequence from its logits.

Theory of operation: in the order of the field's libraries: repetition penalty, temperature, then top_k,
top_p and min_p each narrow what the one before left, then one draw. The draw inverts the cumulative
distribution with one number of the request's own generator, so that a seed gives the same tokens in any
company. Log probabilities are those of the model, before penalty and temperature.

Ownership: one `Sampler` per sequence; it remembers the tokens it gave.

Not here: when a sequence ends (`answer.py`).

Shapes: V vocabulary, K candidates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.prefill import Logits
from common.errors import EngineFailed
from decode_service.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and how likely the model found it."""

    token_id: int
    logprob: float | None
    """Natural logarithm, of the raw distribution; None when nobody asked."""

    top: tuple[tuple[int, float], ...]
    """The most likely tokens with their log probabilities, best first; as many as were asked for."""


class Sampler:
    """Picks the tokens of one sequence."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], rng: random.Random) -> None:
        """Start a sequence; `rng` gives a seed only when the request brings none."""
        self._params = params
        self._generator = torch.Generator()
        self._generator.manual_seed(params.seed if params.seed is not None else rng.getrandbits(63))
        self._seen = set(prompt_ids) if params.repetition_penalty != 1 else None

    def sample(self, logits: Logits) -> SampledToken:
        """Pick the next token; the logits [V] are left as they are.

        Raises EngineFailed when they are no distribution.
        """
        # torch takes no array that cannot be written, such as a view of a message.
        logits_V = torch.from_numpy(logits if logits.flags.writeable else logits.copy())
        if not torch.isfinite(logits_V.max()):
            raise EngineFailed("logits are not finite")
        scores_V = self._penalised(logits_V)
        token_id = int(scores_V.argmax()) if self._params.temperature == 0 else self._draw(scores_V)
        if self._seen is not None:
            self._seen.add(token_id)
        if self._params.logprobs is None:
            return SampledToken(token_id, None, ())
        total = torch.logsumexp(logits_V, 0)
        return SampledToken(token_id, float(logits_V[token_id] - total), self._top(logits_V, total))

    def _penalised(self, logits_V: Tensor) -> Tensor:
        if not self._seen:
            return logits_V
        seen = torch.tensor(sorted(self._seen))
        penalty = self._params.repetition_penalty
        values = logits_V[seen]
        return logits_V.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))

    def _draw(self, scores_V: Tensor) -> int:
        # Relative to the best: a tiny temperature then cannot overflow.
        scaled_V = (scores_V - scores_V.max()).double() / self._params.temperature
        scores_K, token_ids_K = _narrowed(scaled_V, self._params)
        cumulative_K = torch.softmax(scores_K, 0).cumsum(0)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * cumulative_K[-1]
        index = min(int(torch.searchsorted(cumulative_K, point, right=True)), len(cumulative_K) - 1)
        return index if token_ids_K is None else int(token_ids_K[index])

    def _top(self, logits_V: Tensor, total: Tensor) -> tuple[tuple[int, float], ...]:
        count = min(self._params.logprobs or 0, len(logits_V))
        if not count:
            return ()
        values, token_ids = logits_V.topk(count)
        return tuple(zip(token_ids.tolist(), (values - total).tolist(), strict=True))


def _narrowed(scores_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Return the scores and ids of the tokens that may be drawn; no ids when none was dropped."""
    is_cut = 0 < params.top_k < len(scores_V)
    if not is_cut and params.top_p == 1 and params.min_p == 0:
        return scores_V, None
    scores_K, token_ids_K = (
        torch.sort(scores_V, descending=True, stable=True) if not is_cut else (scores_V.topk(params.top_k))
    )
    probabilities_K = torch.softmax(scores_K, 0)
    above_K = probabilities_K.cumsum(0) - probabilities_K
    kept_K = (above_K < params.top_p) & (probabilities_K >= params.min_p * probabilities_K[0])
    kept_K[0] = True
    return scores_K[kept_K], token_ids_K[kept_K]
