"""A prefill and a decode service in one process, on unix sockets, for tests.

Both load their own copy of the model, as two processes would. Leaving `running_pair` stops both and checks
that every owner's counts are back where they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from decode_service import app as decode_app
from decode_service.config import DecodeConfig
from kvspan.client import AsyncClient
from prefill_service import app as prefill_app
from prefill_service.config import PrefillConfig

PAGE_TOKENS = 16
CHUNK_TOKENS = 64
SLAB_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """Two running services and a client of decode."""

    prefill: prefill_app.PrefillService
    decode: decode_app.DecodeService
    client: AsyncClient
    prefill_address: str
    decode_address: str
    slab_dir: Path

    def assert_idle(self) -> None:
        """Check that nothing is held on either side."""
        self.decode.core.check_integrity()
        admission = self.decode.admission.statistics()
        assert admission.num_queued == 0
        assert admission.lanes_used == 0, admission
        for peer in self.decode.peers:
            counts = peer.statistics()
            assert counts.num_transfers == 0, counts
            assert counts.num_slots == 0, counts
        for decode_peer in self.prefill.servicer.peers:
            decode_peer.check_integrity()
            assert decode_peer.statistics().num_jobs == 0, decode_peer.statistics()
        assert not list(self.slab_dir.iterdir())


def make_configs(
    directory: Path, model: str = "tiny:llama", **shared: object
) -> tuple[PrefillConfig, DecodeConfig]:
    """Return small configurations of a pair that fits; `shared` changes fields of both."""
    slab_dir = directory / "slab"
    slab_dir.mkdir(exist_ok=True)
    prefill = PrefillConfig(
        model=model,
        listen=f"unix:{directory}/prefill.sock",
        dtype="float32",
        slab_dir=str(slab_dir),
        page_tokens=PAGE_TOKENS,
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
    return replace(prefill, **shared), replace(decode, **shared)  # type: ignore[arg-type]


@asynccontextmanager
async def running_pair(prefill: PrefillConfig, decode: DecodeConfig) -> AsyncIterator[Pair]:
    """Start both services, wait until the session is open, and stop them in the end."""
    prefill_service = prefill_app.PrefillService(prefill, prefill_app.load(prefill))
    decode_service = decode_app.DecodeService(decode, decode_app.load(decode))
    prefill_address = await prefill_service.start()
    decode_address = await decode_service.start()
    async with AsyncClient(decode_address) as client:
        pair = Pair(
            prefill_service, decode_service, client, prefill_address, decode_address, Path(decode.slab_dir)
        )
        await open_session(pair)
        try:
            yield pair
        finally:
            await decode_service.stop()
            await prefill_service.stop()
    pair.assert_idle()


async def open_session(pair: Pair) -> None:
    """Wait until every peer of decode has an open session."""
    async with asyncio.timeout(20):
        while not all(peer.session for peer in pair.decode.peers):
            await asyncio.sleep(0.005)
