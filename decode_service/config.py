"""What a decode service can be told; read once at the edge, validated, then passed down in parts."""

from __future__ import annotations

from dataclasses import dataclass

import click

from common.kv.digest import DigestKind
from common.session.identity import NumericsPolicy
from common.session.messages import TransferMode
from common.settings import (
    KEY_VALUE,
    MIN_SLAB_BYTES,
    SECONDS,
    TARGET,
    TOKENS,
    ByValue,
    ServiceConfig,
    Size,
    setting,
)

SERVICE_NAME = "kvspan.v1.DecodeService"
"""Its health is that of the route that requests take which name none."""

REMOTE_HEALTH = f"{SERVICE_NAME}.remote"
"""Name of the health of route `remote`: whether a session with a prefill service is open."""

MEMORY_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(ServiceConfig):
    """Settings of one decode service."""

    # fmt: off
    backend: str = setting(
        click.STRING, "NAME", "what decodes: torch, or the name of a backend of an installed package",
        "torch")
    backend_option: tuple[str, ...] = setting(
        KEY_VALUE, "KEY=VALUE", "an option of the backend; may be repeated (default: none)", ())
    backend_factory: str = setting(
        click.STRING, "MODULE:CALLABLE",
        "make the backend by this callable, which runs the code of that module (default: none)", "")
    prefill: tuple[str, ...] = setting(
        TARGET, "ADDR",
        "a prefill service; may be repeated (default: none; prompts are computed in this process)", ())
    slab_bytes: int = setting(
        Size(MIN_SLAB_BYTES, MEMORY_PAGE_BYTES), "SIZE", "shared memory of one session", 256 << 20)
    page_tokens: int = setting(TOKENS, "TOKENS", "size of a cache page; divides --chunk-tokens", 64)
    cache_tokens: int = setting(TOKENS, "TOKENS", "size of the paged cache over all requests", 16384)
    lanes: int = setting(click.IntRange(1, 4096), "COUNT", "requests that decode at the same time", 16)
    queue_limit: int = setting(
        click.IntRange(1, 1 << 20), "COUNT", "requests that may wait; more are refused", 64)
    transfer: TransferMode = setting(
        ByValue(TransferMode), "MODE",
        "stream, deferred or whole, for requests that name none", TransferMode.STREAM)
    route: str = setting(
        click.Choice(["auto", "remote", "local"]), "ROUTE",
        "auto, remote or local, for requests that name none", "auto")
    numerics: NumericsPolicy = setting(
        ByValue(NumericsPolicy), "POLICY",
        "exact or declared: whether prefill services have to compute as this one would, or only say how they "
        "do", NumericsPolicy.EXACT)
    on_prefill_loss: str = setting(
        click.Choice(["fail", "retry", "local"]), "POLICY",
        "fail, retry or local: what becomes of a request whose prefill service is lost too early", "fail")
    digest: DigestKind = setting(
        ByValue(DigestKind), "KIND",
        f"protection of the bytes: {', '.join(kind.value for kind in DigestKind)}", DigestKind.XXH3_64)
    max_new_tokens: int = setting(TOKENS, "TOKENS", "length of answers to requests that name none", 256)
    time_limit_s: float = setting(
        SECONDS, "SECONDS", "longest life of a request; a client may ask for less", 600.0)
    # fmt: on

    @property
    def slab_space_bytes(self) -> int:
        """Bytes of the slabs of all peers."""
        return self.slab_bytes * len(self.prefill)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a rule between fields that is broken."""
        # A prefix that is kept ends on the grid, and on a page.
        is_whole = self.chunk_tokens % self.page_tokens == 0
        self.require(is_whole, "page_tokens", f"must divide --chunk-tokens={self.chunk_tokens}")
        peers, chunk = self.prefill, self.chunk_tokens
        self.require(self.cache_tokens >= chunk, "cache_tokens", f"must be at least --chunk-tokens={chunk}")
        self.require(self.route != "remote" or bool(peers), "route", "needs a service, has --prefill=")
        # Port 0 is a port for each that asks, and never the same.
        is_peer = self.listen in peers and not self.listen.endswith(":0")
        self.require(not is_peer, "prefill", f"must differ from --listen={self.listen}")
        self.require(len(set(peers)) == len(peers), "prefill", "must name each service once")
