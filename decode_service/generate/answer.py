"""What happens to the tokens of one request: sample, check for an end, turn into text.

Theory of operation: `accept` takes logits and gives one `TokenEvent`. Ends are checked for every token, the
first one included, in this order: stop id (its text is not shown), stop string, length. Text is held back
while it may still be part of a character or of a stop string, and comes with the last token; bytes that only
begin a character never do.

Ownership: made on the event loop, then used by the step loop alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from random import Random

from common.engine.prefill import Logits
from common.model.text.stops import StopMatcher
from common.model.text.stream import TextStream
from common.model.text.vocabulary import Vocabulary
from decode_service.generate.sampling import SampledToken, Sampler
from decode_service.request import Request


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    """A stop id, an end-of-sequence token or a stop string."""

    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token and what it adds to the answer."""

    sampled: SampledToken
    text: str
    finish: FinishReason | None


class Answer:
    """The token-level state of one sequence."""

    def __init__(self, request: Request, tokenizer: Vocabulary, rng: Random) -> None:
        """Start; `rng` seeds the sampling of a request that brings no seed."""
        self._request = request
        self._sampler = Sampler(request.sampling, request.prompt_ids, rng)
        self._text = TextStream(tokenizer, request.prompt_ids)
        self._stops = StopMatcher(request.stop)
        self._num_tokens = 0
        self._finish: FinishReason | None = None

    @property
    def request_id(self) -> str:
        """Id of the request that is answered."""
        return self._request.request_id

    def accept(self, logits_V: Logits) -> TokenEvent:
        """Sample the next token from float32 logits [vocabulary] and tell what it means."""
        sampled = self._sampler.sample(logits_V)
        self._num_tokens += 1
        is_stop_id = sampled.token_id in self._request.stop_ids
        text = "" if is_stop_id else self._stops.push(self._text.push([sampled.token_id]))
        if is_stop_id or self._stops.is_stopped:
            self._finish = FinishReason.STOP
        elif self._num_tokens >= self._request.sampling.max_new_tokens:
            self._finish = FinishReason.LENGTH
        if self._finish is not None:
            text += self._flush()
        return TokenEvent(sampled, text, self._finish)

    def _flush(self) -> str:
        """Return the text still held back; it may complete a stop string after all."""
        text = self._stops.push(self._text.flush()) + self._stops.flush()
        if self._stops.is_stopped:
            self._finish = FinishReason.STOP
        return text
