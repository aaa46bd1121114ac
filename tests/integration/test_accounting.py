"""Every request is counted once, as what it is; stages are stamped where they happen (rows A, H14, M, N5)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from common.telemetry.logging import FIELDS
from common.wire.failure import RemoteFailure
from decode_service.prefill import importer
from kvspan.client import AsyncClient
from kvspan.v1 import decode_pb2 as pb
from tests.integration.conftest import Configs, LoadPair
from tests.integration.test_publication import digest_after, num_jobs, wrong_digest
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, failing, gated, lying
from tests.support.pair import PAGE_TOKENS, Pair, running_decode, running_pair, wait_until

PROMPT = prompt_of(200)


async def test_a14_a_prompt_of_no_token_of_one_and_one_too_many_leave_nothing(
    pair: Pair, oracle: Oracle
) -> None:
    """A14: what ends before its first span, or has one position only, is answered and leaves nothing held."""
    for length, code in ((0, grpc.StatusCode.INVALID_ARGUMENT), (1025, grpc.StatusCode.OUT_OF_RANGE)):
        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(prompt_of(length), 2)
        assert caught.value.code is code
        pair.assert_idle()

    oracle.assert_greedy(prompt_of(1), await pair.ask(prompt_of(1), 2))
    pair.assert_idle()
    await pair.assert_no_pages_held()


async def test_a20_prompts_shorter_than_a_page_are_transferred_and_leave_nothing(
    pair: Pair, oracle: Oracle
) -> None:
    """A20: every length below a page is handed over as any other, and nothing of it stays."""
    before = (await pair.client.status()).prompts_remote
    for length in range(1, PAGE_TOKENS):
        prompt = prompt_of(length, length)
        oracle.assert_greedy(prompt, await pair.ask(prompt, 2))
        pair.assert_idle()
        await pair.assert_no_pages_held()
    assert (await pair.client.status()).prompts_remote - before == PAGE_TOKENS - 1


async def test_h14_a_prompt_of_one_token_is_loaded_once(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H14: one token means one transfer with its position once, also when the answer goes on for long."""
    told: list[tuple[int, int, int]] = []
    lying(monkeypatch, lambda span: told.append((span.transfer_id, span.tokens.start, span.tokens.stop)))
    before = await pair.client.status()

    answer = await pair.ask([7], 40)

    oracle.assert_greedy([7], answer)
    assert (await pair.client.status()).prompts_remote - before.prompts_remote == 1
    assert len(told) == answer.timings.num_spans == 1
    assert told[0][1:] == (0, 1)


async def test_m1_prompts_computed_there_and_here_are_counted_apart(pair: Pair) -> None:
    """M1: each prompt counts where it was computed, and none of its tokens as cached when none was."""
    before = await pair.client.status()

    answers = [await pair.ask(PROMPT, 1, route=route) for route in ("remote", "local", "remote")]

    after = await pair.client.status()
    assert after.prompts_remote - before.prompts_remote == 2
    assert after.prompts_local - before.prompts_local == 1
    assert [answer.timings.route for answer in answers] == [
        pb.ROUTE_REMOTE,
        pb.ROUTE_LOCAL,
        pb.ROUTE_REMOTE,
    ]
    assert [(one.usage.cached_tokens, one.usage.prompt_tokens) for one in answers] == [(0, 200)] * 3
    assert [one.timings.num_bytes > 0 for one in answers] == [True, False, True]


Fault = Callable[[Pair, pytest.MonkeyPatch], Awaitable[object]]


async def checksum(pair: Pair, patch: pytest.MonkeyPatch) -> object:
    """Send bytes that do not match."""
    lying(patch, wrong_digest)
    return await pair.ask(PROMPT, 2)


async def deadline(pair: Pair, patch: pytest.MonkeyPatch) -> object:
    """Ask for more than the service's time limit allows."""
    patch.setattr(importer, "digest", digest_after(gate := Gate()))
    try:
        return await pair.ask(PROMPT, 2)
    finally:
        gate.open()


async def cancel(pair: Pair, patch: pytest.MonkeyPatch) -> object:
    """Leave after the first token."""
    stream = pair.client.generate(token_ids=PROMPT, max_new_tokens=800, ignore_eos=True)
    await anext(stream)
    await stream.aclose()
    return None


async def too_long(pair: Pair, patch: pytest.MonkeyPatch) -> object:
    """Ask a prefill service for what never fits there."""
    return await pair.ask(prompt_of(1025), 2, route="remote")


async def invalid(pair: Pair, patch: pytest.MonkeyPatch) -> object:
    """Ask without a token."""
    return await pair.ask([], 2)


async def engine(pair: Pair, patch: pytest.MonkeyPatch) -> object:
    """Ask for a prompt at which the engine breaks."""
    return await pair.ask(prompt_of(77), 2)


@pytest.mark.parametrize(
    ("fault", "counter", "reason"),
    [
        (checksum, "failed", "KV_CHECKSUM"),
        (deadline, "failed", "DEADLINE_EXCEEDED"),
        (engine, "failed", "PREFILL_ENGINE_FAILED"),
        (cancel, "cancelled", ""),
        (too_long, "refused", "REQUEST_CAN_NEVER_FIT"),
        (invalid, "refused", "REQUEST_FIELD_INVALID"),
    ],
)
async def test_m7_each_fault_moves_exactly_one_counter(
    dense: Configs,
    load: LoadPair,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    counter: str,
    reason: str,
) -> None:
    """M7: a fault is counted once, as what it is, and its client is told a reason that no other has."""
    reasons, copies = [], failing(load(*dense), RuntimeError("on fire"), prompt_len=77)
    decode = replace(dense[1], time_limit_s=0.3 if fault is deadline else 60.0)
    async with running_pair(dense[0], decode, copies) as pair:
        before = asdict(pair.decode.core.counts)
        try:
            await fault(pair, monkeypatch)
        except RemoteFailure as error:
            reasons.append(error.reason)
        await pair.wait_idle()
        after = asdict(pair.decode.core.counts)

    ends = ("finished", "failed", "cancelled", "refused")
    assert {name: after[name] - before[name] for name in ends if after[name] != before[name]} == {counter: 1}
    assert after["submitted"] - before["submitted"] == 1
    assert reasons == ([reason] if reason else [])


def ns(duration: Duration) -> int:
    """Return a duration in nanoseconds."""
    return duration.ToNanoseconds()


async def test_m5_the_time_of_a_transfer_is_taken_where_it_happens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M5: time that a copy takes after the engine's end is exposed transfer, and nothing else."""
    gate = Gate()
    monkeypatch.setattr(importer, "digest", digest_after(gate))
    asked_ns = time.monotonic_ns()
    asked = asyncio.create_task(pair.ask(PROMPT, 1))
    await wait_until(lambda: gate.num_arrived == 1 and num_jobs(pair) == 0)
    held_ns = time.monotonic_ns()
    await pair.client.status()
    opened_ns = time.monotonic_ns()
    gate.open()

    timings = (await asked).timings

    assert ns(timings.exposed_transfer) >= opened_ns - held_ns
    assert ns(timings.queued) + ns(timings.waiting) + ns(timings.prefill) <= held_ns - asked_ns


async def test_m9_waiting_for_the_engine_and_computing_are_stages_of_their_own(
    dense: Configs, load: LoadPair
) -> None:
    """M9: a prompt behind another waits, and what it waits is no part of its prefill."""
    gate = Gate()
    async with running_pair(*dense, gated(load(*dense), gate)) as pair:
        first = asyncio.create_task(pair.ask(PROMPT, 1))
        await wait_until(lambda: gate.num_arrived == 1)
        second = asyncio.create_task(pair.ask(PROMPT, 1))
        await wait_until(lambda: num_jobs(pair) == 2)
        queued_ns = time.monotonic_ns()
        await pair.client.status()
        opened_ns = time.monotonic_ns()
        gate.open()

        _, answer = await asyncio.gather(first, second)
        ended_ns = time.monotonic_ns()

    assert ns(answer.timings.waiting) >= opened_ns - queued_ns
    assert ns(answer.timings.prefill) <= ended_ns - opened_ns


async def test_n5_a_prompt_computed_here_for_want_of_a_peer_is_visible(
    dense: Configs, load: LoadPair, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    """N5: with nobody at the address of its peer, log, status and answer say so."""
    caplog.set_level(logging.INFO, "decode_service")
    async with running_decode(dense[1], load(*dense).decode) as (_, address), AsyncClient(address) as client:
        answer = await client.complete(token_ids=PROMPT, max_new_tokens=2, ignore_eos=True, logprobs=1)
        status = await client.status()

    oracle.assert_greedy(PROMPT, answer)
    assert answer.timings.route == pb.ROUTE_LOCAL
    assert (status.prompts_remote, status.prompts_local) == (0, 1)
    assert status.peers[0].state == pb.SESSION_STATE_CONNECTING
    assert status.peers[0].problem
    (chosen,) = [record for record in caplog.records if record.message == "route.chosen"]
    assert chosen.__dict__[FIELDS]["place"] == "local"
