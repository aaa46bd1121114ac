"""Many requests with random cancels over a slab with room for two: the same bytes, leased again and again."""

from __future__ import annotations

import asyncio
import random

from tests.faults.calls import SWARM, Prompt, Request
from tests.faults.checks import Checks, resident_bytes
from tests.faults.services import Cluster, Shape
from tests.faults.table import Verdict

SLAB_FOR_TWO = Shape(slab_bytes=100 << 10)
"""The longest prompt of the swarm needs 51 kB in the slab."""

SHARE_CANCELLED = 0.4
WORKERS = 8
SEED = 4321

FLAT_BYTES = 24 << 20
"""How much larger a service may be after the second half than after the first."""


async def play_reuse(count: int, cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Send `count` requests, some at a time, and check every answer."""
    rng = random.Random(SEED)
    services = (cluster.decodes[0], cluster.prefills[0])
    await _send_all(count // 2, rng, cluster, checks, verdict)
    half = [resident_bytes(service) for service in services]
    await _send_all(count - count // 2, rng, cluster, checks, verdict)
    for service, before in zip(services, half, strict=True):
        grown = resident_bytes(service) - before
        if grown > FLAT_BYTES:
            verdict.leaked.append(
                f"{service.name} grew by {grown >> 10} KiB over {count - count // 2} requests"
            )
    status = await cluster.status()
    verdict.outcome = f"{status.requests.finished} answered and {status.requests.cancelled} given up"


async def _send_all(
    count: int, rng: random.Random, cluster: Cluster, checks: Checks, verdict: Verdict
) -> None:
    """Send requests from a few workers; each cancel strikes at a moment of its own."""
    orders = iter(
        [(rng.choice(SWARM), rng.random() < SHARE_CANCELLED, rng.random() * 0.06) for _ in range(count)]
    )

    async def work() -> None:
        for prompt, is_cancelled, after_s in orders:
            if wrong := await _send(prompt, after_s if is_cancelled else None, cluster, checks):
                verdict.wrong.append(wrong)

    await asyncio.gather(*(work() for _ in range(WORKERS)))


async def _send(prompt: Prompt, cancel_after_s: float | None, cluster: Cluster, checks: Checks) -> str:
    """Send one; return what is wrong with its answer."""
    request = Request(cluster.clients[0], prompt)
    if cancel_after_s is not None:
        # A moment at random: waiting for one that is known would always meet the same state.
        await asyncio.sleep(cancel_after_s)
        request.cancel()
    outcome = await request.outcome()
    return "" if outcome.code == "CANCELLED" else checks.wrong_tokens(cluster, prompt, outcome)
