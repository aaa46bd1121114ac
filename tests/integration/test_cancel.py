"""A request that ends early, in whatever state, leaves nothing held and harms nobody (rows A, G6, G7)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from common.wire.failure import RemoteFailure
from decode_service.api import servicer
from decode_service.api.responses import token_response
from decode_service.generate.answer import TokenEvent
from decode_service.prefill import importer
from kvspan.v1 import decode_pb2 as pb
from tests.integration.conftest import Configs, LoadPair
from tests.integration.test_publication import digest_after
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, gated
from tests.support.pair import WAIT_S, Pair, make_configs, running_pair, wait_until

PROMPT = prompt_of(200)
OTHER = prompt_of(90, seed=4)


async def cancel(task: asyncio.Task[object]) -> None:
    """Cancel a client's call and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def assert_fresh(pair: Pair, oracle: Oracle) -> None:
    """Check that all is free again and that an ordinary request is answered as ORACLE does."""
    await pair.wait_idle()
    await pair.assert_no_pages_held()
    oracle.assert_greedy(OTHER, await pair.ask(OTHER, 3))


async def test_a1_a10_pages_of_a_cancelled_transfer_stay_until_the_producer_has_drained(
    dense: Configs, load: LoadPair, oracle: Oracle
) -> None:
    """A1, A10, rule 4: the call ends at once; pages and slot come back when the engine has stopped."""
    gate = Gate()
    async with running_pair(*dense, gated(load(*dense), gate)) as pair:
        asked = asyncio.create_task(pair.ask(PROMPT, 2))
        gate.let_pass(1)
        await wait_until(lambda: gate.num_arrived == 2)

        await cancel(asked)
        await wait_until(lambda: pair.decode.core.counts.live == 0)
        held = await pair.client.status()
        assert held.reservations.draining == 1
        assert held.groups[0].used_pages > 0
        assert held.peers[0].num_slots == 1

        gate.open()
        await assert_fresh(pair, oracle)


async def test_u2_h17_cancel_while_a_copy_runs_keeps_pages_until_it_has_ended(
    dense: Configs, load: LoadPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U2, H17: with the importer inside a copy, cancel frees nothing; others decode meanwhile."""
    gate = Gate()
    async with running_pair(*dense, load(*dense)) as pair:
        monkeypatch.setattr(importer, "digest", digest_after(gate))
        asked = asyncio.create_task(pair.ask(PROMPT, 2))
        await wait_until(lambda: gate.num_arrived == 1)

        await cancel(asked)
        await wait_until(lambda: pair.decode.core.counts.live == 0)
        neighbour = await pair.ask(OTHER, 3, route="local")
        oracle.assert_greedy(OTHER, neighbour)
        assert pair.decode.admission.statistics().num_draining == 1

        gate.open()
        await assert_fresh(pair, oracle)


async def test_g6_a_write_that_the_client_does_not_read_ends_when_the_client_goes(
    dense: Configs, load: LoadPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G6: a handler that is blocked in a write ends with its client, and frees its lane; others go on."""
    written: list[int] = []

    def large_response(events: Sequence[TokenEvent], *, with_logprobs: bool) -> pb.GenerateResponse:
        written.append(len(events))
        response = token_response(events, with_logprobs=with_logprobs)
        response.text = "x" * (1 << 20)
        return response

    async with running_pair(*dense, load(*dense)) as pair:
        await pair.ask(OTHER, 1)
        num_tasks = len(asyncio.all_tasks())
        with monkeypatch.context() as patch:
            patch.setattr(servicer, "token_response", large_response)
            stream = pair.client.generate(token_ids=OTHER, max_new_tokens=50, ignore_eos=True)
            await anext(stream)
            await wait_for_steps(pair, 49)
        oracle.assert_greedy(PROMPT, await pair.ask(PROMPT, 3))
        assert sum(written) < 50
        assert pair.decode.core.counts.live == 1

        await stream.aclose()
        await wait_until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        assert pair.decode.core.counts.cancelled == 1
        await assert_fresh(pair, oracle)


async def wait_for_steps(pair: Pair, num_steps: int) -> None:
    """Wait until decode has made so many steps."""
    async with asyncio.timeout(WAIT_S):
        while (await pair.client.status()).num_steps < num_steps:
            continue


async def test_t4_a_deadline_ends_a_request_that_waits(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle
) -> None:
    """T4, rule 9: deadlines of a transferring and a queued request hold without any new work arriving."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"], lanes=1), Gate()
    async with running_pair(*configs, gated(load(*configs), gate)) as pair:
        ends = await asyncio.gather(
            pair.ask(PROMPT, 2, time_limit_s=0.3),
            pair.ask(OTHER, 2, time_limit_s=0.3),
            return_exceptions=True,
        )

        assert [end.code for end in ends if isinstance(end, RemoteFailure)] == [
            grpc.StatusCode.DEADLINE_EXCEEDED
        ] * 2
        gate.open()
        await assert_fresh(pair, oracle)


async def test_a11_a_cancel_in_either_role_raises_nowhere(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    oracle: Oracle,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A11: a cancel of what decode queues, prefill queues, computes, or decode answers, logs no error."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"], lanes=3), Gate()
    async with running_pair(*configs, gated(load(*configs), gate)) as pair:
        decoding = pair.client.generate(token_ids=OTHER, max_new_tokens=1000, ignore_eos=True, route="local")
        await anext(decoding)
        computed = asyncio.create_task(pair.ask(PROMPT, 2))
        await wait_until(lambda: gate.num_arrived == 1)
        queued_there = asyncio.create_task(pair.ask(PROMPT, 2))
        await wait_until(lambda: pair.decode.peers[0].statistics().num_transfers == 2)
        queued_here = asyncio.create_task(pair.ask(PROMPT, 2))
        await wait_until(lambda: pair.decode.admission.statistics().num_queued == 1)

        for task in (queued_here, queued_there, computed):
            await cancel(task)
        await decoding.aclose()
        gate.open()
        await assert_fresh(pair, oracle)

        assert pair.decode.core.counts.cancelled == 4
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a9_a16_bursts_of_cancelled_requests_leave_a_pair_that_serves(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle
) -> None:
    """A9, A16: three bursts of sixteen requests, all cancelled in whatever state, then one is served."""
    configs = make_configs(tmp_path, checkpoints["DENSE"], lanes=4, queue_limit=16)
    async with running_pair(*configs, load(*configs)) as pair:
        for burst in range(3):
            tasks = [
                asyncio.create_task(pair.ask(prompt_of(30 + 9 * number, seed=burst), 50))
                for number in range(16)
            ]
            await wait_until(lambda: pair.decode.core.counts.live == 16)
            await asyncio.gather(*(cancel(task) for task in tasks))
            await pair.wait_idle()
        await assert_fresh(pair, oracle)
