"""What a prefill service can be told; read once at the edge, validated, then passed down in parts."""

from __future__ import annotations

from dataclasses import dataclass

import click

from common.kv.spans import PART_ALIGNMENT
from common.settings import (
    KEY_VALUE,
    MIN_SLAB_BYTES,
    SECONDS,
    TOKENS,
    ServiceConfig,
    Size,
    setting,
    size_text,
)
from common.slab.mapped import SlabLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(ServiceConfig):
    """Settings of one prefill service."""

    # fmt: off
    engine: str = setting(
        click.STRING, "NAME", "what computes: torch, or the name of an engine of an installed package",
        "torch")
    engine_option: tuple[str, ...] = setting(
        KEY_VALUE, "KEY=VALUE", "an option of the engine; may be repeated (default: none)", ())
    engine_factory: str = setting(
        click.STRING, "MODULE:CALLABLE",
        "make the engine by this callable, which runs the code of that module (default: none)", "")
    min_span_bytes: int = setting(
        Size(1), "SIZE",
        "layers are merged until a span has this size: a small prompt is one span, not thirty", 512 << 10)
    max_span_bytes: int = setting(
        Size(PART_ALIGNMENT), "SIZE",
        "no span is larger, unless one token of one layer is; keeps the tail after the last layer short",
        1 << 20)
    max_prompt_tokens: int = setting(TOKENS, "TOKENS", "longest prompt", 8192)
    max_slab_bytes: int = setting(
        Size(MIN_SLAB_BYTES), "SIZE", "a decode service with a larger slab is refused", 4 << 30)
    max_slabs_bytes: int = setting(
        Size(MIN_SLAB_BYTES), "SIZE",
        "slabs of all sessions together; a decode service whose slab has no room in them is refused",
        16 << 30)
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
        for least, most in (("min_span_bytes", "max_span_bytes"), ("max_slab_bytes", "max_slabs_bytes")):
            limit = getattr(self, most)
            problem = f"must not exceed --{most.replace('_', '-')}={size_text(limit)}"
            self.require(getattr(self, least) <= limit, least, problem)

    @property
    def slab_limits(self) -> SlabLimits:
        """How much of what peers name is mapped."""
        return SlabLimits(self.max_slab_bytes, self.max_slabs_bytes)
