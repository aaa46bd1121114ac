"""One request as the decode service understands it, after validation, and the rules of its sampling."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from common.errors import Violation
from common.session.messages import TransferMode

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for with each token."""

_MAX_SEED = 2**63 - 1


class Route(enum.Enum):
    """Where a prompt is computed."""

    REMOTE = "remote"
    """In a prefill service."""

    LOCAL = "local"
    """In this process, with the same engine code."""

    AUTO = "auto"
    """Where it is cheaper, as measured; decided when the request is admitted."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request wants its tokens picked; made by the client, so check it with `sampling_violations`."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """Zero picks the most likely token."""

    top_k: int = 0
    """Keep the k most likely tokens; zero keeps all."""

    top_p: float = 1.0
    """Keep the fewest tokens that hold this much probability."""

    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""

    repetition_penalty: float = 1.0
    """Logits of tokens seen are divided by it where positive, multiplied where negative."""

    seed: int | None = None
    """Of the request's generator; drawn for it when not given."""

    logprobs: int | None = None
    """Alternatives to report with each token; None reports no probabilities at all, and costs less."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate and how; every field is valid."""

    request_id: str
    """Made by this service, unique over its lives; every line about a request has it, in both services."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    """Texts that end the answer and are not part of it."""

    stop_ids: frozenset[int]
    """Token ids that end the answer, end-of-sequence ids included unless they are ignored."""

    route: Route
    mode: TransferMode
    time_limit_s: float
    """Seconds from arrival, after which the request fails."""

    client_request_id: str = ""
    """The client's own name for it, fit to be logged; never a key."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)


@dataclass(slots=True)
class RequestCounts:
    """Requests since start. Invariant: submitted = finished + failed + cancelled + refused + live."""

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """Turned away before anything was held."""

    live: int = 0
    reading: int = 0
    """Of the live ones those that are still read: they hold nothing, and shutting down waits for them too."""

    prompts_remote: int = 0
    prompts_local: int = 0
    retried: int = 0
    """Attempts after the first, of requests whose prefill service was lost."""


def sampling_violations(params: SamplingParams) -> tuple[Violation, ...]:
    """Return every field that is out of its range."""
    rules = (
        ("max_new_tokens", params.max_new_tokens >= 1, "must be at least 1"),
        ("temperature", math.isfinite(params.temperature) and params.temperature >= 0, "must be 0 or more"),
        ("top_k", params.top_k >= 0, "must be 0 (off) or more"),
        ("top_p", 0 < params.top_p <= 1, "must be in (0, 1]"),
        ("min_p", 0 <= params.min_p <= 1, "must be in [0, 1]"),
        (
            "repetition_penalty",
            math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0,
            "must be greater than 0",
        ),
        ("seed", params.seed is None or 0 <= params.seed <= _MAX_SEED, f"must be in [0, {_MAX_SEED}]"),
        ("logprobs", 0 <= (params.logprobs or 0) <= MAX_LOGPROBS, f"must be in [0, {MAX_LOGPROBS}]"),
    )
    return tuple(
        Violation(field, f"{problem}, got {getattr(params, field)}")
        for field, is_met, problem in rules
        if not is_met
    )
