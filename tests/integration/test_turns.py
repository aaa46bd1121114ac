"""Two decode services at one prefill service: each gets its turn, whatever becomes of the other's credit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from common.kv.digest import DigestKind, digest
from common.wire.failure import RemoteFailure
from decode_service.prefill import importer
from kvspan.client import AsyncClient
from prefill_service.app import PrefillService
from tests.integration.conftest import LoadPair
from tests.support.cases import prompt_of
from tests.support.gates import Gate
from tests.support.pair import make_configs, open_session, running_decode, running_prefill, wait_until

SLAB_BYTES = 64 << 10
LONG, SHORT = prompt_of(300), prompt_of(21)
"""KV of 1 KiB a token: the long one streams through half of the slab, the short one fits."""


@dataclass(slots=True)
class Stuck:
    """Importing threads that stop before each span until the gate is opened: they give no credit."""

    threads: set[threading.Thread] = field(default_factory=set)
    gate: Gate = field(default_factory=Gate)

    def digest(self, kind: DigestKind, content: memoryview) -> bytes:
        """See `common.kv.digest`."""
        if threading.current_thread() in self.threads:
            self.gate.wait()
        return digest(kind, content)


@dataclass(frozen=True, slots=True)
class Trio:
    """One prefill service and clients of two decode services, the second of which is stuck."""

    prefill: PrefillService
    first: AsyncClient
    second: AsyncClient

    async def until_held(self, transfer_id: int) -> None:
        """Wait until this transfer of the second keeps the engine waiting."""

        def is_held() -> bool:
            job = self.prefill.engine_loop.running
            return bool(job and job.key == (2, transfer_id) and job.is_waiting)

        await wait_until(is_held)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    """No thread is stuck yet."""
    stuck = Stuck()
    monkeypatch.setattr(importer, "digest", stuck.digest)
    yield stuck
    stuck.gate.open()


@asynccontextmanager
async def running_trio(tmp_path: Path, model: str, load: LoadPair, stuck: Stuck) -> AsyncIterator[Trio]:
    """Run the three; the bound of credit is longer than a test may take."""
    prefill, decode = make_configs(tmp_path, model, slab_bytes=SLAB_BYTES, credit_wait_s=600.0)
    other = replace(decode, listen=f"unix:{tmp_path}/other.sock", lanes=6)
    async with (
        running_prefill(prefill, load(prefill, decode).prefill) as (service, _),
        running_decode(decode, load(prefill, decode).decode) as (first, first_address),
    ):
        await open_session(first)
        others = set(threading.enumerate())
        async with running_decode(other, load(prefill, other).decode) as (second, second_address):
            await open_session(second)
            started = set(threading.enumerate()) - others
            stuck.threads |= {thread for thread in started if thread.name == "importer"}
            async with AsyncClient(first_address) as asking, AsyncClient(second_address) as holding:
                yield Trio(service, asking, holding)
            stuck.gate.open()


async def test_a_decode_service_that_gives_no_credit_holds_the_engine_from_nobody(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, stuck: Stuck
) -> None:
    """Its prompts fail, each as soon as another session waits; it is served again once it gives credit."""
    async with running_trio(tmp_path, checkpoints["DENSE"], load, stuck) as trio:
        expected = await trio.first.complete(token_ids=SHORT, max_new_tokens=3, route="local")
        answers, held = [], []
        for transfer_id in (1, 2):
            held.append(
                asyncio.create_task(trio.second.complete(token_ids=LONG, max_new_tokens=3, route="remote"))
            )
            await trio.until_held(transfer_id)
            asked = [trio.first.complete(token_ids=SHORT, max_new_tokens=3, route="remote") for _ in range(2)]
            answers += await asyncio.gather(*asked)

        assert [one.token_ids for one in answers] == [expected.token_ids] * 4
        for task in held:
            with pytest.raises(RemoteFailure, match="while another session waits") as caught:
                await task
            assert (caught.value.code.name, caught.value.reason) == ("ABORTED", "LEASE_EXPIRED")
            assert caught.value.retry_after_s
        stuck.gate.open()
        served = await trio.second.complete(token_ids=SHORT, max_new_tokens=3, route="remote")
        assert served.token_ids == expected.token_ids
