"""What a prefill service can be told; read once at the edge, validated, then passed down in parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Settings of one prefill service; `kvspan prefill --help` shows the same with defaults."""

    model: str
    """`demo`, `tiny:NAME` or a local Hugging Face folder."""

    listen: str
    """`host:port` (port 0 picks one) or `unix:PATH`."""

    dtype: str = "auto"
    slab_dir: str = "/dev/shm"
    """Where this process sees the directory that decode makes slabs in."""

    page_tokens: int = 64
    """Tokens in a page; must equal decode's."""

    chunk_tokens: int = 256
    """Tokens of one prefill forward; part of the numerics: equal to decode's, a multiple of page_tokens."""

    min_span_bytes: int = 512 << 10
    """Layers merge into one span until it has this many bytes: a small prompt is one span, not thirty."""

    max_span_bytes: int = 1 << 20
    """Cap of a span: keeps the tail after the last layer short (measured: 1 MB is enough)."""

    max_prompt_tokens: int = 8192
    max_concurrency: int = 64
    """Transfers of one session that may be started and not ended; the engine runs one at a time."""

    silence_limit_s: float = 3.0
    """Seconds of silence after which a connected peer counts as lost; pings go every half second."""

    credit_wait_s: float = 30.0
    """Seconds a prompt larger than its slot waits for room, all waits together; decode gives it back within
    milliseconds.
    """

    threads: int = 0
    """CPU threads of the engine; 0 takes the cores of the host divided by its two services."""

    journal: str = ""
    """File for the record that `kvspan audit journal` checks; empty writes none."""

    grace_s: float = 10.0
    """Seconds running work may take after SIGTERM."""
