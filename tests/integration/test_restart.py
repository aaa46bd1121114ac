"""Either service may start first, leave and come back; health, statuses and slab directory say the truth."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from common.errors import ShuttingDown
from common.slab.segment import SlabSegment
from common.wire.channel import make_channel
from common.wire.failure import RemoteFailure
from decode_service.app import DecodeService
from decode_service.config import REMOTE_HEALTH, SERVICE_NAME, DecodeConfig
from decode_service.prefill import session_transfers
from decode_service.prefill.prefill_client import PeerState
from kvspan.client import AsyncClient
from tests.integration.conftest import Configs, LoadPair
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, gated
from tests.support.pair import open_session, running_decode, running_prefill, wait_until
from tests.support.wire import is_serving

PROMPT = prompt_of(130)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def wait_for_health(address: str, wanted: int) -> None:
    """Follow what grpc.health.v1 says of route `remote` until it is `wanted`."""
    async with asyncio.timeout(60), make_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=REMOTE_HEALTH)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        async for answer in watch:
            if answer.status == wanted:
                watch.cancel()
                return


async def assert_unavailable(address: str) -> None:
    """Check that a request for the prefill service is refused at once, and told when to come back."""
    async with AsyncClient(address) as client:
        with pytest.raises(RemoteFailure) as caught:
            await client.complete(token_ids=PROMPT, max_new_tokens=1, route="remote")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "PREFILL_UNAVAILABLE")
    assert caught.value.retry_after_s == 1


async def assert_served(address: str, oracle: Oracle, **options: str) -> None:
    """Check that a request is answered as ORACLE does."""
    async with AsyncClient(address) as client:
        answer = await client.complete(
            token_ids=PROMPT,
            max_new_tokens=3,
            ignore_eos=True,
            logprobs=1,
            **options,  # type: ignore[arg-type]
        )
    oracle.assert_greedy(PROMPT, answer)


def num_sessions(service: DecodeService) -> int:
    """Return the sessions opened since start."""
    return service.peers[0].statistics().num_sessions


def slab_sockets(config: DecodeConfig) -> list[Path]:
    """Return what lies in the slab directory."""
    return list(Path(config.slab_dir).iterdir())


async def test_h5_prefill_may_restart(dense: Configs, load: LoadPair, oracle: Oracle) -> None:
    """H5, H10, H11: decode says NOT_SERVING while prefill is away and opens a new session when it is back."""
    copies = load(*dense)
    async with running_decode(dense[1], copies.decode) as (service, address):
        boots = set()
        for life in range(1, 4):
            async with running_prefill(dense[0], copies.prefill):
                await wait_for_health(address, SERVING)
                boots.add(service.peers[0].statistics().boot_id)
                await assert_served(address, oracle)
                assert num_sessions(service) == life
                assert slab_sockets(dense[1]) == []
            await wait_for_health(address, NOT_SERVING)
            await assert_unavailable(address)
            await assert_served(address, oracle, route="auto")

        assert len(boots) == 3
        assert service.peers[0].statistics().num_transfers == 0


@pytest.mark.parametrize(("route", "serves"), [("auto", True), ("local", True), ("remote", False)])
async def test_health_is_that_of_the_route_by_default(
    dense: Configs, load: LoadPair, route: str, serves: bool
) -> None:
    """Without any session this process computes what it may; whether there is one has a name of its own."""
    copies = load(*dense)
    config = replace(dense[1], route=route)
    async with running_decode(config, copies.decode) as (_, address), make_channel(address) as channel:
        told = [await is_serving(channel, name) for name in ("", SERVICE_NAME, REMOTE_HEALTH)]

    assert told == [serves, serves, False]


async def test_h2_decode_may_restart(dense: Configs, load: LoadPair, oracle: Oracle) -> None:
    """H2: prefill forgets a decode service that went and serves the next one, slabs of the first unmapped."""
    copies = load(*dense)
    async with running_prefill(dense[0], copies.prefill) as (prefill, _):
        for _ in range(3):
            async with running_decode(dense[1], copies.decode) as (service, address):
                await open_session(service)
                assert len(prefill.servicer.peers) == 1
                await assert_served(address, oracle)
            await wait_until(lambda: not prefill.servicer.peers)
            assert slab_sockets(dense[1]) == []


async def test_a17_decode_that_leaves_frees_what_prefill_holds(
    dense: Configs, load: LoadPair, oracle: Oracle
) -> None:
    """A17, rule 4: when decode goes in the middle, prefill stops the engine and unmaps when it has ended."""
    gate, copies = Gate(), load(*dense)
    impatient = replace(dense[1], grace_s=0.0)
    async with running_prefill(dense[0], gated(copies, gate).prefill) as (prefill, _):
        async with AsyncClient(dense[1].listen) as client:
            async with running_decode(impatient, copies.decode) as (service, _):
                await open_session(service)
                asked = asyncio.create_task(client.complete(token_ids=PROMPT, max_new_tokens=3))
                await wait_until(lambda: gate.num_arrived == 1)
            await asyncio.wait({asked})
        failure = asked.exception()
        assert isinstance(failure, RemoteFailure)
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        await wait_until(lambda: prefill.servicer.peers[0].statistics().state.value == "closed")
        assert prefill.servicer.peers[0].statistics().pinned_bytes > 0

        gate.open()
        await wait_until(lambda: not prefill.servicer.peers)
        async with running_decode(dense[1], copies.decode) as (service, address):
            await open_session(service)
            await assert_served(address, oracle)


def maps_a_slab() -> bool:
    """Tell whether a slab is mapped in this process."""
    return "/memfd:kvspan-" in Path("/proc/self/maps").read_text()


async def test_no_slab_is_made_for_a_prefill_service_that_shuts_down(
    dense: Configs, load: LoadPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode leaves an idle session at once, and asks again before it makes another slab."""
    copies, made, create = load(*dense), list[Path](), SlabSegment.create

    def noted(directory: Path, *rest: Any) -> SlabSegment:
        made.append(directory)
        return create(directory, *rest)

    monkeypatch.setattr(SlabSegment, "create", noted)
    async with (
        running_decode(dense[1], copies.decode) as (service, _),
        running_prefill(dense[0], copies.prefill) as (prefill, _),
    ):
        await open_session(service)
        made.clear()
        assert maps_a_slab()
        prefill.servicer.shut_down()

        await wait_until(lambda: ShuttingDown.code in str(service.peers[0].problem))

        await wait_until(lambda: not maps_a_slab())
        assert made == []


async def test_a_prompt_that_does_not_drain_costs_its_neighbours_nothing(
    dense: Configs, load: LoadPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules 4 and 8: its session finishes what runs in it, while another one takes what comes."""
    monkeypatch.setattr(session_transfers, "DRAIN_LIMIT_S", 0.1)
    gate, copies = Gate(), load(*dense)
    async with (
        running_prefill(dense[0], gated(copies, gate).prefill),
        running_decode(dense[1], copies.decode) as (service, address),
        AsyncClient(address) as client,
    ):
        await open_session(service)
        peer = service.peers[0]
        first = peer.session
        given_up = asyncio.create_task(client.complete(token_ids=PROMPT, max_new_tokens=3))
        await wait_until(lambda: gate.num_arrived == 1)
        neighbour = asyncio.create_task(
            client.complete(token_ids=PROMPT, max_new_tokens=3, ignore_eos=True, logprobs=1)
        )
        await wait_until(lambda: peer.statistics().num_transfers == 2)
        given_up.cancel()
        await wait_until(lambda: peer.session is not None and peer.session is not first)
        assert first is not None
        assert first.is_open
        assert (peer.statistics().state, num_sessions(service)) == (PeerState.OPEN, 2)

        gate.open()
        oracle.assert_greedy(PROMPT, await neighbour)
        await assert_served(address, oracle)
        await wait_until(lambda: not first.is_open)
        assert slab_sockets(dense[1]) == []
        assert peer.statistics().num_transfers == 0
        await wait_until(lambda: service.admission.statistics().lanes_used == 0)


@pytest.mark.parametrize("num_lanes", [1, 6], ids=["alone", "beside a neighbour"])
async def test_who_waits_goes_on_in_the_session_after_one_that_did_not_drain(
    dense: Configs, load: LoadPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, num_lanes: int
) -> None:
    """Waiting binds to no session, whether the one that was passed ends at once or finishes others first."""
    monkeypatch.setattr(session_transfers, "DRAIN_LIMIT_S", 0.1)
    gate, decode = Gate(), replace(dense[1], lanes=num_lanes)
    copies = load(replace(dense[0], max_concurrency=2), decode)
    async with (
        running_prefill(replace(dense[0], max_concurrency=2), gated(copies, gate).prefill),
        running_decode(decode, copies.decode) as (service, address),
        AsyncClient(address) as client,
    ):
        await open_session(service)
        first = service.peers[0].session
        given_up = asyncio.create_task(client.complete(token_ids=PROMPT, max_new_tokens=3))
        await wait_until(lambda: gate.num_arrived == 1)
        others = [
            asyncio.create_task(
                client.complete(
                    token_ids=PROMPT, max_new_tokens=3, ignore_eos=True, logprobs=1, route="remote"
                )
            )
            for _ in range(2)
        ]
        await wait_until(lambda: service.admission.statistics().num_queued == (2 if num_lanes == 1 else 1))
        given_up.cancel()
        await wait_until(lambda: service.peers[0].session not in (None, first))

        gate.open()
        for other in others:
            oracle.assert_greedy(PROMPT, await other)
        await wait_until(lambda: service.admission.statistics().lanes_used == 0)
