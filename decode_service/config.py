"""What a decode service can be told; read once at the edge, validated, then passed down in parts."""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.digest import DigestKind
from common.session.messages import TransferMode


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Settings of one decode service; `kvspan decode --help` shows the same with defaults."""

    model: str
    """`demo`, `tiny:NAME` or a local Hugging Face folder."""

    listen: str
    """`host:port` (port 0 picks one) or `unix:PATH`."""

    prefill: tuple[str, ...] = ()
    """Addresses of prefill services; none means every prompt is computed in this process."""

    dtype: str = "auto"
    slab_dir: str = "/dev/shm"
    slab_bytes: int = 256 << 20
    """Shared memory of one session, header included."""

    page_tokens: int = 64
    chunk_tokens: int = 256
    """Chunk grid of the numerics; must equal prefill's; a multiple of page_tokens."""

    cache_tokens: int = 16384
    """Tokens the paged cache holds over all requests (full-attention groups)."""

    lanes: int = 16
    """Rows of the decode batch: requests that run at the same time."""

    queue_limit: int = 64
    """Requests that may wait for lanes, pages or slots; more are refused."""

    transfer: TransferMode = TransferMode.STREAM
    route: str = "auto"
    """auto | remote | local: where the prompt of a request that names no route is computed."""

    on_prefill_loss: str = "fail"
    """fail | retry | local: what becomes of a request whose prefill service is lost before publication."""

    digest: DigestKind = DigestKind.XXH3_64
    max_new_tokens: int = 256
    """Used by requests that name none."""

    time_limit_s: float = 600.0
    """Longest life of a request without a deadline of its own."""

    silence_limit_s: float = 3.0
    """Seconds of silence after which a connected peer counts as lost; pings go every half second."""

    threads: int = 0
    """CPU threads of the step loop; 0 takes the cores of the host divided by its two services."""

    journal: str = ""
    """File for the record that `kvspan audit journal` checks; empty writes none."""

    grace_s: float = 10.0
    """Seconds running requests may take after SIGTERM."""
