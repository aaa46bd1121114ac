"""Many requests in a row cost what one costs (rule 9): nothing of them stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import psutil
import pytest
import pytest_asyncio

from common.runtime.memory import trim_memory
from tests.integration.conftest import LoadPair, shared_pair
from tests.support.cases import prompt_of
from tests.support.leaks import assert_no_leak, take_census
from tests.support.pair import MODES, Pair, make_configs

NUM_WARM_UP = 50
"""One request of each prompt length, so that every buffer has its size before the first reading."""

NUM_REQUESTS = 200
MIN_MOVED_BYTES = 40 << 20
MAX_GROWTH_BYTES = 4 << 20
"""A tenth of the KV that is moved, so that a copy of every fifth prompt would not fit. Noise is 0.5 MiB."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running DENSE pair."""
    configs = make_configs(tmp_path_factory.mktemp("pair"), checkpoints["DENSE"])
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


async def serve(pair: Pair, number: int) -> int:
    """Ask one request of the mix: every mode and route, finished and cancelled ones; return the KV moved."""
    prompt = prompt_of(280 + number % 50, seed=number)
    route: Literal["local", "remote"] = "local" if number % 10 == 9 else "remote"
    if number % 7:
        answer = await pair.ask(prompt, 2, transfer=MODES[number % 3], route=route)
        return answer.timings.num_bytes
    stream = pair.client.generate(token_ids=prompt, max_new_tokens=100, ignore_eos=True, route=route)
    async for _ in stream:
        break
    await stream.aclose()
    return 0


def resident_bytes() -> int:
    """Return the memory of this process once nothing of it only waits to be given back."""
    trim_memory()
    rss: int = psutil.Process().memory_info().rss
    return rss


@pytest.mark.slow
async def test_two_hundred_requests_grow_nothing(pair: Pair) -> None:
    """Rule 9, A21: 200 requests add no thread, descriptor, task or slab file, and no memory to speak of."""
    for number in range(NUM_WARM_UP):
        await serve(pair, number)
    await pair.wait_idle()
    before, tasks, resident = take_census(pair.slab_dir), len(asyncio.all_tasks()), resident_bytes()

    moved = sum([await serve(pair, number) for number in range(NUM_REQUESTS)])
    await pair.wait_idle()

    assert_no_leak(before, pair.slab_dir)
    assert len(asyncio.all_tasks()) <= tasks
    assert moved > MIN_MOVED_BYTES
    assert resident_bytes() - resident < MAX_GROWTH_BYTES
    assert pair.decode.core.counts.submitted == 2 + NUM_WARM_UP + NUM_REQUESTS


async def test_two_hundred_requests_use_few_slots(pair: Pair) -> None:
    """A21: slots recycle: the slab has one file, no bytes leased, and its free bytes are one run again."""
    peer = pair.decode.peers[0].statistics()

    assert (peer.num_slots, peer.slab_leased_bytes, peer.num_sessions) == (0, 0, 1)
    assert list(Path(pair.slab_dir).iterdir()) == []  # noqa: ASYNC240
