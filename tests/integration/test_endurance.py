"""Many requests cost what one costs (rule 9): nothing of them stays, and no peak is higher for them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from common.runtime.memory import trim_memory
from kvspan.client import AsyncClient
from tests.support.cases import prompt_of
from tests.support.pair import MODES, Pair

NUM_ROUNDS = 4
ROUND_REQUESTS = 50
"""One of each prompt length; a round goes before the first reading, so that every buffer has its size."""

MIN_MOVED_BYTES = 10 << 20
"""KV of a round; a tenth of it may stay, so that a copy of every fifth prompt would not fit."""


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


async def serve_round(pair: Pair, number: int) -> tuple[int, int]:
    """Serve one round; return the KV moved and the memory of the process once nothing is held any more."""
    requests = range(number * ROUND_REQUESTS, (number + 1) * ROUND_REQUESTS)
    moved = sum([await serve(pair, request) for request in requests])
    await pair.wait_idle()
    return moved, resident_bytes()


@pytest.mark.slow
async def test_two_hundred_requests_grow_nothing(pair: Pair) -> None:
    """Rule 9, A21: 200 requests add no thread, descriptor, task or slab socket, and no memory to speak of.

    All but memory is looked at behind every test of this folder. What requests keep grows in every round;
    what the libraries take for good, whenever they do, does not.
    """
    rounds = [await serve_round(pair, number) for number in range(1 + NUM_ROUNDS)]
    residents = [resident for _, resident in rounds]
    growth = [after - before for before, after in pairwise(residents)]

    moved = min(moved for moved, _ in rounds)
    assert moved > MIN_MOVED_BYTES
    assert min(growth) < moved // 10, growth
    assert pair.decode.core.counts.submitted == 2 + (1 + NUM_ROUNDS) * ROUND_REQUESTS


async def test_two_hundred_requests_use_few_slots(pair: Pair) -> None:
    """A21: slots recycle: the slab has one file, no bytes leased, and its free bytes are one run again."""
    peer = pair.decode.peers[0].statistics()

    assert (peer.num_slots, peer.slab_leased_bytes, peer.num_sessions) == (0, 0, 1)
    assert list(Path(pair.slab_dir).iterdir()) == []  # noqa: ASYNC240


PROMPTS_AT_ONCE = 32
PROMPT_TOKENS = 1000
PEAK_CACHE_TOKENS = 32_768
PEAK_CACHE_BYTES = PEAK_CACHE_TOKENS * 5 * 3 * 12 * 2 * 4
"""Layers, heads, head size, keys and values, and bytes of a number of tiny:llama in float32."""

PEAK_ALLOWANCE_BYTES = 20 << 20
"""For messages, activations and the working store of one prompt; less than half of the KV that is moved."""


@asynccontextmanager
async def running_processes(folder: Path, slab_dir: Path) -> AsyncIterator[dict[str, int]]:
    """Yield the process ids of a pair, by service, once it serves at decode.sock in the folder."""
    command = [sys.executable, "-m", "kvspan.cli", "up", "--model", "tiny:llama", "--dtype", "float32"]
    command += ["--log-level", "error", "--threads", "1", "--lanes", str(PROMPTS_AT_ONCE)]
    command += ["--cache-tokens", str(PEAK_CACHE_TOKENS), "--queue-limit", str(PROMPTS_AT_ONCE)]
    command += ["--listen", f"unix:{folder}/decode.sock", "--slab-dir", str(slab_dir), "--slab-bytes", "4MiB"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"ready ")
        yield {child.cmdline()[3]: child.pid for child in psutil.Process(process.pid).children()}
    finally:
        process.terminate()
        await process.wait()


def status_bytes(pid: int, field: str) -> int:
    """Return a size that the system tells: VmRSS is what is resident, VmHWM the most that ever was."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


async def serve_at_once(client: AsyncClient) -> int:
    """Ask many prompts at the same time, in every mode; return the KV moved."""
    prompts = [prompt_of(PROMPT_TOKENS, seed) for seed in range(PROMPTS_AT_ONCE)]
    ways: list[dict[str, Any]] = [{"route": "remote", "transfer": mode} for mode in MODES]
    asked = [
        client.complete(token_ids=prompt, max_new_tokens=2, **ways[number % 3])
        for number, prompt in enumerate(prompts)
    ]
    return sum(answer.timings.num_bytes for answer in await asyncio.gather(*asked))


@pytest.mark.slow
@pytest.mark.multiprocess
async def test_the_peak_of_a_service_is_what_it_has_when_it_is_ready(tmp_path: Path, slab_dir: Path) -> None:
    """Rule 9: over program, weights, cache and slab, all there from the start, serving needs little.

    The weights are too small to count, so that both services begin alike but for the cache of decode.
    """
    async with (
        running_processes(tmp_path, slab_dir) as pids,
        AsyncClient(f"unix:{tmp_path}/decode.sock") as client,
    ):
        ready = {name: status_bytes(pid, "VmRSS") for name, pid in pids.items()}
        moved = await serve_at_once(client)
        growth = {name: status_bytes(pid, "VmHWM") - ready[name] for name, pid in pids.items()}

    assert moved > 2 * PEAK_ALLOWANCE_BYTES
    assert growth.keys() == {"decode", "prefill"}
    assert max(growth.values()) < PEAK_ALLOWANCE_BYTES, growth
    assert ready["decode"] - ready["prefill"] < PEAK_CACHE_BYTES + PEAK_ALLOWANCE_BYTES, ready
