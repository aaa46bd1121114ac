"""Peers of a prefill service that talk nonsense at full speed, or open sessions without end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.wire import call_limits
from common.wire.channel import make_channel
from common.wire.failure import remote_failure
from common.wire.responses import responses_of
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1 import transfer_pb2_grpc
from prefill_service.app import MAX_SESSIONS
from tests.faults.impostors import Impostor
from tests.integration.conftest import LoadPair, shared_pair
from tests.support.pair import Pair, make_configs
from tests.support.slabs import served_slab

NUM_OTHERS = 10
SLAB_BYTES = 1 << 20
PROMPTS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running DENSE pair."""
    configs = make_configs(tmp_path_factory.mktemp("pair"), checkpoints["DENSE"])
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


@dataclass(frozen=True, slots=True)
class Stranger:
    """A session of a peer that is no decode service."""

    me: Impostor
    call: Any
    responses: AsyncIterator[pb.TransferResponse]

    async def heard(self) -> pb.TransferResponse:
        """Return the next message."""
        return await anext(self.responses)

    async def served(self) -> list[bytes]:
        """Have prompts computed one after the other; return the logits of each."""
        logits = []
        for transfer_id in range(1, PROMPTS + 1):
            await self.call.write(self.me.start(transfer_id=transfer_id, time_limit={"seconds": 60}))
            while (response := await self.heard()).WhichOneof("message") != "prefill_done":
                assert response.WhichOneof("message") in {"prefill_accepted", "kv_span"}
            logits.append(response.prefill_done.logits)
        return logits

    async def talk(self, message: pb.TransferRequest) -> None:
        """Say a thing until the session is cut off."""
        hearing = asyncio.create_task(self._hear())
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self.call.write(message)
        await hearing

    async def _hear(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for _ in self.responses:
                pass


@asynccontextmanager
async def opened(address: str, slab_dir: Path) -> AsyncIterator[Stranger]:
    """Yield an open session with a slab and a connection of its own."""
    with served_slab(slab_dir, SLAB_BYTES, "other") as slab:
        async with make_channel(address) as channel:
            stub = transfer_pb2_grpc.PrefillServiceStub(channel)
            offer = await stub.GetCapabilities(pb.PrefillServiceGetCapabilitiesRequest())
            call: Any = stub.Transfer()
            stranger = Stranger(Impostor(slab, offer.identity), call, responses_of(call))
            try:
                await call.write(stranger.me.hello())
                assert (await stranger.heard()).WhichOneof("message") == "welcome"
                yield stranger
            finally:
                call.cancel()


NONSENSE: dict[str, Callable[[Impostor], pb.TransferRequest]] = {
    "release": lambda _: pb.TransferRequest(release_span=pb.ReleaseSpan(transfer_id=9, attempt=1)),
    "cancel": lambda _: pb.TransferRequest(cancel_prefill=pb.CancelPrefill(transfer_id=9, attempt=1)),
    "unknown token": lambda me: me.start(token_ids=[1 << 30]),
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
async def test_ten_sessions_are_served_beside_one_that_talks_nonsense(
    pair: Pair, said: Callable[[Impostor], pb.TransferRequest], caplog: pytest.LogCaptureFixture
) -> None:
    """The one is cut off after a bound that is said; the others have the numbers that they always have."""
    caplog.set_level(logging.INFO, "common.wire.interceptor")
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(opened(pair.prefill_address, pair.slab_dir))
            for _ in range(NUM_OTHERS + 2)
        ]
        hostile, quiet, *others = sessions
        expected = await quiet.served()

        talk = hostile.talk(said(hostile.me))
        _, *answers = await asyncio.gather(talk, *(other.served() for other in others))

    assert answers == [expected] * NUM_OTHERS
    ends = [record.fields["error"] for record in caplog.records if record.message == "call.failed"]  # type: ignore[attr-defined]
    assert ends == ["1001 strays, at most 1000 may come"]


async def test_sessions_that_say_nothing_keep_nobody_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be, and more: a session that greets is welcomed, the one that is open goes on."""
    async with make_channel(pair.prefill_address) as channel:
        stub = transfer_pb2_grpc.PrefillServiceStub(channel)
        silent: list[Any] = [stub.Transfer() for _ in range(2 * MAX_SESSIONS)]
        ends = [asyncio.create_task(_end(call)) for call in silent]
        # Those beyond the limit are refused; one session is decode's.
        while sum(end.done() for end in ends) < MAX_SESSIONS + 1:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
        monkeypatch.setattr(call_limits, "PATIENCE_S", 0.0)

        async with opened(pair.prefill_address, pair.slab_dir) as stranger:
            logits = await stranger.served()
        answer = await pair.ask([65] * 40, 3, route="remote")
        for one in silent:
            one.cancel()
        refused = await asyncio.gather(*ends)

    assert len(logits) == PROMPTS
    assert len(answer.token_ids) == 3
    assert refused.count("CALLS_EXHAUSTED") == MAX_SESSIONS + 2


async def _end(call: Any) -> str:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return remote_failure(error).reason or error.code().name
    except asyncio.CancelledError:
        return "CANCELLED"
    return str((await call.code()).name)
