"""Pools that are full: who runs goes on, who waits holds nothing (rows A2, C6, C11, C12, S19, W19)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from common.engine.prefill import Logits, PrefillEngine, Wanted
from common.kv.plan import SpanPlan
from common.kv.writer import KVWriter
from common.wire.failure import RemoteFailure
from tests.integration.conftest import LoadPair
from tests.integration.test_publication import num_jobs
from tests.integration.test_windows_and_groups import with_pools
from tests.support.cases import Oracle, prompt_of
from tests.support.factories import plan_of
from tests.support.gates import Gate, Prefill, gated, with_engine
from tests.support.pair import LoadedPair, Pair, make_configs, running_pair, wait_until


def recording(loaded: LoadedPair, computed: list[int]) -> LoadedPair:
    """Return the pair with a prefill engine that writes down the length of each prompt it gets."""

    def run(inner: PrefillEngine) -> Prefill:
        def prefill(
            tokens: list[int], wanted: Wanted, writer: KVWriter, cancelled: Callable[[], bool]
        ) -> Logits:
            computed.append(len(tokens))
            return inner.prefill(tokens, wanted, writer, cancelled)

        return prefill

    return with_engine(loaded, run)


async def used_pages(pair: Pair) -> list[int]:
    """Return the pages of each group that are held."""
    return [group.used_pages for group in (await pair.client.status()).groups]


async def test_a2_w19_prefill_hears_only_of_what_was_admitted(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle
) -> None:
    """A2, W19: of four requests at once three are admitted and one is refused; prefill computes three."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"], lanes=2, queue_limit=1), Gate()
    prompts = [prompt_of(length, length) for length in (64, 65, 66, 67)]
    computed: list[int] = []
    copies = recording(gated(load(*configs), gate), computed)
    async with running_pair(*configs, copies) as pair:
        asked = [asyncio.create_task(pair.ask(prompt, 3)) for prompt in prompts[:3]]
        await wait_until(lambda: pair.decode.admission.statistics().num_queued == 1)
        assert num_jobs(pair) <= 2
        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(prompts[3], 3)
        gate.open()

        for prompt, task in zip(prompts, asked, strict=False):
            oracle.assert_greedy(prompt, await task)
        pair.assert_idle()
    assert caught.value.reason == "QUEUE_FULL"
    assert sorted(computed) == [64, 65, 66]


async def test_c6_c11_an_answer_grows_to_its_end_while_others_hold_the_rest_of_the_pool(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle
) -> None:
    """C6, C11: what runs needs no page that a reservation took, and takes none of a reservation."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"], cache_tokens=320, lanes=4), Gate()
    prompts = [prompt_of(90, 1), prompt_of(91, 2)]
    async with running_pair(*configs, gated(load(*configs), gate)) as pair:
        loading = [asyncio.create_task(pair.ask(prompt, 6)) for prompt in prompts]
        await wait_until(lambda: num_jobs(pair) == 2)
        running = asyncio.create_task(pair.ask(prompt_of(20), 100, route="local"))
        await wait_until(lambda: pair.decode.admission.statistics().lanes_used == 3)
        waiting = asyncio.create_task(pair.ask(prompt_of(40), 6))
        await wait_until(lambda: pair.decode.admission.statistics().num_queued == 1)
        assert await used_pages(pair) == [6 + 6 + 8]

        oracle.assert_greedy(prompt_of(20), await running)
        gate.open()
        for prompt, task in zip([*prompts, prompt_of(40)], [*loading, waiting], strict=True):
            oracle.assert_greedy(prompt, await task)


async def test_c12_a_transfer_into_scattered_pages_is_told_in_as_few_spans(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle
) -> None:
    """C12: spans follow the prompt and not the pages: their number, as reported, is that of the plan."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"], cache_tokens=320), Gate()
    async with running_pair(*configs, gated(load(*configs), gate)) as pair:
        neighbours = []
        for seed in range(4):
            neighbours.append(asyncio.create_task(pair.ask(prompt_of(75, seed), 6)))
            await wait_until(lambda: num_jobs(pair) == len(neighbours))
        for cancelled in neighbours[1::2]:
            cancelled.cancel()
        await wait_until(lambda: num_jobs(pair) == 2)
        assert await used_pages(pair) == [2 * 5]
        asked = asyncio.create_task(pair.ask(prompt_of(150), 10))
        await wait_until(lambda: num_jobs(pair) == 3)
        assert await used_pages(pair) == [20]
        plan = span_plan(pair, 150)
        gate.open()

        answer = await asked
        await asyncio.gather(*neighbours, return_exceptions=True)
    oracle.assert_greedy(prompt_of(150), answer)
    assert answer.timings.num_spans == plan.num_spans


def span_plan(pair: Pair, prompt_len: int) -> SpanPlan:
    """Return the spans that the pair has agreed on for a prompt."""
    (peer,) = pair.decode.peers
    assert peer.session
    return plan_of(
        pair.loaded.decode.backend.identity().geometry, 0, prompt_len, peer.session.welcome.granularity
    )


async def test_s19_with_the_window_pool_full_an_answer_ends_one_request_waits_and_one_is_refused(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracles: Callable[[str], Oracle]
) -> None:
    """S19: while one answer decodes in the only window pages, nobody takes them and nothing breaks."""
    configs, gate = make_configs(tmp_path, checkpoints["HYB"], queue_limit=1), Gate()
    copies = load(*configs)
    copies = gated(LoadedPair(copies.prefill, with_pools(copies.decode, configs[1].lanes, (3, 128))), gate)
    first, second = prompt_of(40, 1), prompt_of(50, 2)
    async with running_pair(*configs, copies) as pair:
        decoding = asyncio.create_task(pair.ask(first, 80))
        await wait_until(lambda: gate.num_arrived == 1)
        waiting = asyncio.create_task(pair.ask(second, 10))
        await wait_until(lambda: pair.decode.admission.statistics().num_queued == 1)
        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(prompt_of(60, 3), 2)
        gate.open()
        await wait_until(lambda: pair.decode.admission.statistics().num_decoding == 1)
        assert (await used_pages(pair))[0] == 3
        assert pair.decode.admission.statistics().num_queued == 1

        oracles("HYB").assert_greedy(first, await decoding)
        oracles("HYB").assert_greedy(second, await waiting)
        await pair.wait_idle()
        await pair.assert_no_pages_held()
    assert caught.value.reason == "QUEUE_FULL"
