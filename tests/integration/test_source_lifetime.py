"""What is read is still there, and what is written has a place (rows A5, H9, U4, U6, U9, U11, W2)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.wire.failure import RemoteFailure
from decode_service.prefill import importer
from tests.integration.conftest import Configs, LoadPair
from tests.integration.test_publication import digest_after, num_jobs
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, gated, gated_at_end
from tests.support.pair import MODES, Pair, make_configs, running_pair, wait_until

PROMPT = prompt_of(200)
OTHER = prompt_of(190, seed=4)

TIME_LIMIT_S = 0.7
"""Long enough for a prompt to be computed, and waited out by tests of what comes later."""


def pinned_bytes(pair: Pair) -> int:
    """Return the slab bytes that prefill holds for its jobs."""
    return sum(peer.statistics().pinned_bytes for peer in pair.prefill.servicer.peers)


@pytest.mark.parametrize("mode", MODES)
async def test_a5_prefill_holds_nothing_once_a_prompt_is_published(
    dense: Configs, load: LoadPair, mode: Any
) -> None:
    """A5: with the first token out, nothing is pinned any more, long before any time limit ends."""
    async with running_pair(*dense, load(*dense)) as pair:
        stream = pair.client.generate(
            token_ids=prompt_of(64), max_new_tokens=500, ignore_eos=True, time_limit_s=600, transfer=mode
        )
        await anext(stream)

        assert (num_jobs(pair), pinned_bytes(pair)) == (0, 0)
        await stream.aclose()


@pytest.mark.parametrize("mode", MODES)
async def test_u4_the_next_prompt_changes_nothing_of_one_that_is_still_copied(
    dense: Configs, load: LoadPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """U4: prefill computes and ends a second prompt while no byte of the first has left the slab."""
    gate, ends = Gate(), Gate()
    ends.open()
    async with running_pair(*dense, gated_at_end(load(*dense), ends)) as pair:
        monkeypatch.setattr(importer, "digest", digest_after(gate))
        first = asyncio.create_task(pair.ask(PROMPT, 3, transfer=mode))
        await wait_until(lambda: gate.num_arrived == 1)
        second = asyncio.create_task(pair.ask(OTHER, 3, transfer=mode))
        await wait_until(lambda: ends.num_arrived == 2 and num_jobs(pair) == 0)
        assert pair.decode.peers[0].statistics().num_slots == 2
        gate.open()

        oracle.assert_greedy(PROMPT, await first)
        oracle.assert_greedy(OTHER, await second)


@pytest.mark.parametrize("mode", MODES)
async def test_h9_u6_w2_a_copy_that_outlives_its_lease_is_an_error_and_keeps_what_it_reads(
    dense: Configs, load: LoadPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """H9, U6, W2: a read beyond the deadline ends the call; slot and pages stay until it has ended."""
    gate = Gate()
    async with running_pair(*dense, load(*dense)) as pair:
        await pair.ask(PROMPT, 3)  # the first prompt starts threads, and takes longer
        monkeypatch.setattr(importer, "digest", digest_after(gate))
        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(PROMPT, 3, time_limit_s=TIME_LIMIT_S, transfer=mode)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert gate.num_arrived == 1
        await wait_until(lambda: pair.decode.admission.statistics().num_draining == 1)
        assert pair.decode.peers[0].statistics().num_slots == 1
        second = asyncio.create_task(pair.ask(OTHER, 3, transfer=mode))
        await wait_until(lambda: pair.decode.peers[0].statistics().num_slots == 2)
        gate.open()

        oracle.assert_greedy(OTHER, await second)
        await pair.wait_idle()
        await pair.assert_no_pages_held()


async def test_u11_a_prompt_that_expires_while_it_is_written_stays_pinned_until_the_engine_has_ended(
    dense: Configs, load: LoadPair, oracle: Oracle
) -> None:
    """U11: the time limit alone frees nothing that the engine may still write, on either side."""
    gate = Gate()
    async with running_pair(*dense, gated(load(*dense), gate)) as pair:
        gate.let_pass(5)
        await pair.ask(PROMPT, 3)  # four chunks; the first prompt starts threads, and takes longer
        asked = asyncio.create_task(pair.ask(PROMPT, 3, time_limit_s=TIME_LIMIT_S))
        await wait_until(lambda: gate.num_arrived == 6)
        with pytest.raises(RemoteFailure) as caught:
            await asked
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_until(lambda: pair.decode.admission.statistics().num_draining == 1)
        assert pinned_bytes(pair) == pair.decode.peers[0].statistics().slab_leased_bytes > 0
        gate.open()

        await pair.wait_idle()
        await pair.assert_no_pages_held()
        oracle.assert_greedy(OTHER, await pair.ask(OTHER, 3))


async def test_u9_many_prompts_at_once_get_their_own_first_tokens(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle
) -> None:
    """U9: 64 short prompts that share slots and lanes one after another answer with their own first token."""
    configs = make_configs(tmp_path, checkpoints["DENSE"], queue_limit=64)
    prompts = prompts_with_unique_first_tokens(oracle, 64)
    async with running_pair(*configs, load(*configs)) as pair:
        answers = await pair.ask_all([prompt for prompt, _ in prompts], 1)

    assert [answer.token_ids for answer in answers] == [(token,) for _, token in prompts]


def prompts_with_unique_first_tokens(oracle: Oracle, count: int) -> list[tuple[list[int], int]]:
    """Return prompts of 5 tokens that ORACLE continues with a different token each."""
    found: dict[int, list[int]] = {}
    seed = 0
    while len(found) < count:
        prompt, seed = prompt_of(5, seed), seed + 1
        found.setdefault(int(oracle.logprobs(prompt)[0].argmax()), prompt)
    return [(prompt, token) for token, prompt in found.items()]
