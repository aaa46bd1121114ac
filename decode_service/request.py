"""One generation as the decode service understands it, after validation."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.session.messages import TransferMode
from decode_service.sampling import SamplingParams


class Route(enum.Enum):
    """Where a prompt is computed."""

    REMOTE = "remote"
    """In a prefill service."""

    LOCAL = "local"
    """In this process, with the same engine code."""

    AUTO = "auto"
    """Where it is cheaper, as measured; decided when the request is admitted."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate and how; every field is valid."""

    request_id: str
    """Made by this service; unique in its life. The client's own name is only logged."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    """Texts that end the generation and are not part of it."""

    stop_ids: frozenset[int]
    """Token ids that end the generation, end-of-sequence ids included unless they are ignored."""

    route: Route
    mode: TransferMode
    time_limit_s: float
    """Seconds from arrival, after which the request fails."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)
