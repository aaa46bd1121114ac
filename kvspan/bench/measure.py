"""Takes one sample: a prompt's first token, some decode steps, or a look at the idle pair.

Ownership: nothing is kept between samples; each call leaves the pair idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvspan.bench.arms import GENERATE, KVSPAN, Arm
from kvspan.bench.baseline import Baseline
from kvspan.bench.environment import process_cpu_s
from kvspan.bench.lanes import Interval, LaneWatch, steps_s
from kvspan.bench.records import DecodeSample, IdleSample, TransferSample
from kvspan.bench.workloads import ANSWER_TOKENS
from kvspan.commands.command import CommandFailed

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from kvspan.client import AsyncClient
    from kvspan.v1.decode_pb2 import GenerateResponse, GetStatusResponse

Prompt = Sequence[int]

IDLE_LIMIT_S = 30.0
"""How long the pair may take to let go of cancelled requests."""

_LOOK_AGAIN_S = 0.02


async def measure_transfer(
    client: AsyncClient, arm: Arm, prompt: Prompt, turn: tuple[int, int]
) -> TransferSample:
    """Return one first token by one arm; `turn` is (round, position in it)."""
    start_ns = time.monotonic_ns()
    first_ns, answer = 0, []
    responses = client.generate(
        token_ids=prompt, max_new_tokens=1, ignore_eos=True, route=arm.route, transfer=arm.transfer
    )
    async for response in responses:
        first_ns = first_ns or time.monotonic_ns()
        answer.append(response)
    last = answer[-1]
    if last.usage.prompt_tokens != len(prompt) or last.usage.cached_tokens:
        raise CommandFailed(f"{arm.name}: {len(prompt)} tokens were sent, the service counts {last.usage}")
    if last.timings.clock_error:
        raise CommandFailed(f"{arm.name}: the clocks of the two services differ, so no stage can be compared")
    return _transfer_sample(arm, last, (first_ns - start_ns) / 1e9, turn)


def _transfer_sample(
    arm: Arm, last: GenerateResponse, ttft_s: float, turn: tuple[int, int]
) -> TransferSample:
    timings = last.timings
    return TransferSample(
        round_index=turn[0],
        position=turn[1],
        arm=arm.name,
        prompt_tokens=last.usage.prompt_tokens,
        ttft_s=ttft_s,
        queued_s=_seconds(timings.queued),
        waiting_s=_seconds(timings.waiting),
        prefill_s=_seconds(timings.prefill),
        exposed_s=_seconds(timings.exposed_transfer),
        first_token_s=_seconds(timings.first_token),
        overlap=timings.overlap,
        num_spans=timings.num_spans,
        num_spans_overlapped=timings.num_spans_overlapped,
        num_bytes=timings.num_bytes,
    )


async def measure_lanes(client: AsyncClient, prompts: Sequence[Prompt], num_steps: int) -> Interval:
    """Decode all prompts at once until `num_steps` steps had all of them, then give them up."""
    watch = LaneWatch([len(prompt) for prompt in prompts], num_steps)

    async def follow(lane: int, prompt: Prompt) -> None:
        answer = client.generate(
            token_ids=prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True, route="remote"
        )
        async with aclosing(answer) as responses:
            async for response in responses:
                watch.arrived(lane, len(response.token_ids), time.monotonic_ns())
                if watch.is_complete:
                    return
        raise CommandFailed(f"lane {lane} ended before {num_steps} steps had all {len(prompts)} lanes")

    tasks = [asyncio.create_task(follow(lane, prompt)) for lane, prompt in enumerate(prompts)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await wait_idle(client)
    return watch.interval()


def lanes_sample(interval: Interval, lanes: int, round_index: int) -> DecodeSample:
    """Return the sample that an interval of the pair makes."""
    return DecodeSample(
        round_index, KVSPAN, lanes, interval.context_tokens, interval.num_tokens, interval.step_s
    )


async def measure_generate(
    baseline: Baseline, prompts: Sequence[Prompt], num_steps: int, round_index: int
) -> DecodeSample:
    """Return `num_steps` steps of a static batch; the first step after the prompt does not count."""
    times_ns = (await baseline.generate(prompts, num_steps + 2)).times_ns
    lanes, context = len(prompts), len(prompts[0]) + 2
    return DecodeSample(round_index, GENERATE, lanes, context, lanes * num_steps, steps_s(times_ns[1:]))


async def measure_idle(pids: Mapping[str, int], seconds: float, round_index: int) -> IdleSample:
    """Return the CPU time of both services over a stretch in which nobody asks them."""
    start_ns, before = time.monotonic_ns(), {name: process_cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(seconds)
    used = {name: process_cpu_s(pid) - before[name] for name, pid in pids.items()}
    return IdleSample(round_index, (time.monotonic_ns() - start_ns) / 1e9, used["decode"], used["prefill"])


async def wait_idle(client: AsyncClient) -> None:
    """Return when the pair has let go of every request; raises CommandFailed when it does not."""
    try:
        async with asyncio.timeout(IDLE_LIMIT_S):
            while _is_busy(await client.status()):  # noqa: ASYNC110 - nobody tells a client of it
                await asyncio.sleep(_LOOK_AGAIN_S)
    except TimeoutError:
        raise CommandFailed(f"the pair still holds requests after {IDLE_LIMIT_S:g} s") from None


def _is_busy(status: GetStatusResponse) -> bool:
    held = status.reservations
    return bool(held.queued + held.transferring + held.decoding + held.draining)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
