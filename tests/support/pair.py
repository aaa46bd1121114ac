"""A prefill and a decode service in one process, for tests.

Both load their own copy of the model, as two processes would; a copy may be loaded once and given to several
services, one after the other. Leaving a service's context stops it; leaving `running_pair` also checks that
every owner's counts are back where they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from decode_service import app as decode_app
from decode_service.cache.storage import PagedStorage
from decode_service.config import DecodeConfig
from decode_service.generate.backends.torch_backend import TorchBackend
from kvspan.client import AsyncClient, Completion
from kvspan.v1 import decode_pb2 as pb
from prefill_service import app as prefill_app
from prefill_service.config import PrefillConfig

ConfigT = TypeVar("ConfigT", PrefillConfig, DecodeConfig)
ServiceT = TypeVar("ServiceT", prefill_app.PrefillService, decode_app.DecodeService)

PAGE_TOKENS = 16
CHUNK_TOKENS = 64
SLAB_BYTES = 8 << 20

MODES = ("stream", "whole", "deferred")

WAIT_S = 20.0
"""Longest wait for something that has to happen; a healthy run waits milliseconds."""


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """The two copies of a model; used by one running pair at a time."""

    prefill: prefill_app.Loaded
    decode: decode_app.Loaded


@dataclass(frozen=True, slots=True)
class Pair:
    """Two running services and a client of decode."""

    prefill: prefill_app.PrefillService
    decode: decode_app.DecodeService
    client: AsyncClient
    prefill_address: str
    decode_address: str
    slab_dir: Path
    loaded: LoadedPair

    async def ask(self, prompt: Sequence[int], max_new_tokens: int = 4, **options: Any) -> Completion:
        """Return a greedy answer of exactly `max_new_tokens` tokens, with log-probabilities."""
        given = {"ignore_eos": True, "logprobs": 1, **options}
        return await self.client.complete(token_ids=prompt, max_new_tokens=max_new_tokens, **given)

    async def ask_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 4, **options: Any
    ) -> list[Completion]:
        """Ask all prompts at once; as many run together as there are lanes."""
        return await asyncio.gather(*(self.ask(prompt, max_new_tokens, **options) for prompt in prompts))

    async def wait_idle(self) -> None:
        """Wait until no request holds anything on either side."""
        await wait_until(self._is_idle)
        self.assert_idle()

    def assert_idle(self) -> None:
        """Check that nothing is held on either side, and that the books of decode balance."""
        self.decode.core.check_integrity()
        admission = self.decode.admission.statistics()
        assert admission.num_queued == 0
        assert admission.lanes_used == 0, admission
        counts = self.decode.core.counts
        assert counts.live == 0, counts
        for peer in self.decode.peers:
            peer_counts = peer.statistics()
            assert peer_counts.num_transfers == 0, peer_counts
            assert peer_counts.num_slots == 0, peer_counts
            assert peer_counts.slab_leased_bytes == 0, peer_counts
        for decode_peer in self.prefill.servicer.peers:
            decode_peer.check_integrity()
            assert decode_peer.statistics().num_jobs == 0, decode_peer.statistics()
            assert decode_peer.statistics().pinned_bytes == 0, decode_peer.statistics()
        assert not list(self.slab_dir.iterdir())

    async def assert_no_pages_held(self) -> None:
        """Check, as an operator would, that every page of every group is free."""
        status: pb.GetStatusResponse = await self.client.status()
        assert [group.used_pages for group in status.groups] == [0] * len(status.groups)

    def _is_idle(self) -> bool:
        jobs = sum(peer.statistics().num_jobs for peer in self.prefill.servicer.peers)
        transfers = sum(peer.statistics().num_transfers for peer in self.decode.peers)
        return not (
            jobs or transfers or self.decode.core.counts.live or self.decode.admission.statistics().lanes_used
        )


def make_configs(
    directory: Path, model: str = "tiny:llama", **changes: object
) -> tuple[PrefillConfig, DecodeConfig]:
    """Return small configurations of a pair that fits; `changes` are made on each side that has the field."""
    slab_dir = directory / "slab"
    slab_dir.mkdir(exist_ok=True)
    prefill = PrefillConfig(
        model=model,
        listen=f"unix:{directory}/prefill.sock",
        dtype="float32",
        slab_dir=str(slab_dir),
        chunk_tokens=CHUNK_TOKENS,
        min_span_bytes=4096,
        max_span_bytes=16384,
        max_prompt_tokens=1024,
        threads=1,
        grace_s=5.0,
    )
    decode = DecodeConfig(
        model=model,
        listen=f"unix:{directory}/decode.sock",
        prefill=(prefill.listen,),
        dtype="float32",
        slab_dir=str(slab_dir),
        slab_bytes=SLAB_BYTES,
        page_tokens=PAGE_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        cache_tokens=2048,
        lanes=8,
        queue_limit=16,
        threads=1,
        grace_s=5.0,
    )
    unknown = set(changes) - _names(prefill) - _names(decode)
    assert not unknown, unknown
    return _changed(prefill, changes), _changed(decode, changes)


def _names(config: PrefillConfig | DecodeConfig) -> set[str]:
    return {field.name for field in fields(config)}


def _changed(config: ConfigT, changes: dict[str, object]) -> ConfigT:
    known: dict[str, Any] = {name: value for name, value in changes.items() if name in _names(config)}
    return replace(config, **known)


def load_pair(prefill: PrefillConfig, decode: DecodeConfig) -> LoadedPair:
    """Load both copies of the model."""
    return LoadedPair(prefill_app.load(prefill), decode_app.load(decode))


@asynccontextmanager
async def _running(service: ServiceT) -> AsyncIterator[tuple[ServiceT, str]]:
    """Start a service, yield it with its address, and stop it in the end."""
    address = await service.start()
    try:
        yield service, address
    finally:
        await service.stop()


def running_prefill(
    config: PrefillConfig, loaded: prefill_app.Loaded
) -> AbstractAsyncContextManager[tuple[prefill_app.PrefillService, str]]:
    """Run a prefill service."""
    return _running(prefill_app.PrefillService(config, loaded))


def running_decode(
    config: DecodeConfig, loaded: decode_app.Loaded
) -> AbstractAsyncContextManager[tuple[decode_app.DecodeService, str]]:
    """Run a decode service."""
    return _running(decode_app.DecodeService(config, loaded))


@asynccontextmanager
async def running_pair(
    prefill: PrefillConfig, decode: DecodeConfig, loaded: LoadedPair | None = None
) -> AsyncIterator[Pair]:
    """Start both services, wait until the session is open, and stop them in the end.

    A decode service that was told the configured address of prefill is told the one that was bound.
    """
    copies = loaded or load_pair(prefill, decode)
    async with running_prefill(prefill, copies.prefill) as (prefill_service, prefill_address):
        if decode.prefill == (prefill.listen,):
            decode = replace(decode, prefill=(prefill_address,))
        async with (
            running_decode(decode, copies.decode) as (decode_service, decode_address),
            AsyncClient(decode_address) as client,
        ):
            pair = Pair(
                prefill_service,
                decode_service,
                client,
                prefill_address,
                decode_address,
                Path(decode.slab_dir),
                copies,
            )
            await open_session(pair.decode)
            yield pair
    pair.assert_idle()


async def open_session(decode: decode_app.DecodeService) -> None:
    """Wait until every peer of decode has an open session."""
    await wait_until(lambda: all(peer.session for peer in decode.peers))


async def wait_until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; fails after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        # Conditions are facts of other objects, some of other threads: there is no event to wait for.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def pages_of(loaded: decode_app.Loaded) -> PagedStorage:
    """Return the pages of a decode service."""
    assert isinstance(loaded.backend, TorchBackend)
    return loaded.backend.storage
