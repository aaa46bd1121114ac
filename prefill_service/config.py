"""What a prefill service can be told; read once at the edge, validated, then passed down in parts."""

from __future__ import annotations

from dataclasses import dataclass

import click

from common.kv.spans import PART_ALIGNMENT
from common.settings import SECONDS, TOKENS, ServiceConfig, Size, setting, size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(ServiceConfig):
    """Settings of one prefill service."""

    # fmt: off
    min_span_bytes: int = setting(
        Size(1), "SIZE",
        "layers are merged until a span has this size: a small prompt is one span, not thirty", 512 << 10)
    max_span_bytes: int = setting(
        Size(PART_ALIGNMENT), "SIZE",
        "no span is larger, unless one token of one layer is; keeps the tail after the last layer short",
        1 << 20)
    max_prompt_tokens: int = setting(TOKENS, "TOKENS", "longest prompt", 8192)
    max_concurrency: int = setting(
        click.IntRange(1, 1 << 16), "COUNT",
        "transfers of one session that may be open; the engine runs one at a time", 64)
    credit_wait_s: float = setting(
        SECONDS, "SECONDS",
        "how long a prompt larger than its share of the slab waits for room in all before it fails; "
        "a second while another decode service waits for the engine", 30.0)
    # fmt: on

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a rule between fields that is broken."""
        ServiceConfig.__post_init__(self)
        problem = f"must not exceed --max-span-bytes={size_text(self.max_span_bytes)}"
        self.require(self.min_span_bytes <= self.max_span_bytes, "min_span_bytes", problem)
