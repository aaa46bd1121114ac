"""Many requests in a row cost what one costs (rule 9): nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import psutil
import pytest
import pytest_asyncio

from tests.integration.conftest import LoadPair, shared_pair
from tests.support.cases import prompt_of
from tests.support.leaks import assert_no_leak, take_census
from tests.support.pair import MODES, Pair, make_configs

NUM_REQUESTS = 200
MAX_GROWTH_BYTES = 24 << 20
"""Well above the noise of allocators; the KV of the prompts alone is 20 MB, their copies as much again."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running DENSE pair."""
    configs = make_configs(tmp_path_factory.mktemp("pair"), checkpoints["DENSE"])
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


async def serve(pair: Pair, number: int) -> None:
    """Ask one request of the mix: every mode and route, finished and cancelled ones."""
    prompt = prompt_of(40 + number % 50, seed=number)
    route: Literal["local", "remote"] = "local" if number % 10 == 9 else "remote"
    if number % 7:
        await pair.ask(prompt, 2, transfer=MODES[number % 3], route=route)
        return
    stream = pair.client.generate(token_ids=prompt, max_new_tokens=100, ignore_eos=True, route=route)
    async for _ in stream:
        break
    await stream.aclose()


@pytest.mark.slow
async def test_two_hundred_requests_grow_nothing(pair: Pair) -> None:
    """Rule 9, A21: 200 requests add no thread, descriptor, task, slab file or memory."""
    process = psutil.Process()
    for number in range(40):
        await serve(pair, number)
    await pair.wait_idle()
    gc.collect()
    before, tasks, rss = take_census(pair.slab_dir), len(asyncio.all_tasks()), process.memory_info().rss

    for number in range(NUM_REQUESTS):
        await serve(pair, number)
    await pair.wait_idle()

    assert_no_leak(before, pair.slab_dir)
    assert len(asyncio.all_tasks()) <= tasks
    assert process.memory_info().rss - rss < MAX_GROWTH_BYTES
    assert pair.decode.core.counts.submitted == 2 + 40 + NUM_REQUESTS


async def test_two_hundred_requests_use_few_slots(pair: Pair) -> None:
    """A21: slots recycle: the slab has one file, no bytes leased, and its free bytes are one run again."""
    peer = pair.decode.peers[0].statistics()

    assert (peer.num_slots, peer.slab_leased_bytes, peer.num_sessions) == (0, 0, 1)
    assert list(Path(pair.slab_dir).iterdir()) == []  # noqa: ASYNC240
