"""Runs `bench quick`: starts a pair and the baseline, takes every sample of the plan, stops both.

Theory of operation: one part after another (first tokens, decode, idle), each in rounds that have every arm
once. Only one side works at a time: the pair while the baseline sleeps, and the other way round. Each sample
is written before the next one is taken.

Ownership: both services and the baseline are children that end with this context.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.runtime.threads import resolve_threads
from common.settings import setting_text
from decode_service.config import REMOTE_HEALTH
from kvspan.bench import measure
from kvspan.bench.arms import ARMS, DECODERS, KVSPAN, in_order
from kvspan.bench.baseline import Baseline
from kvspan.bench.environment import describe_environment
from kvspan.bench.lanes import prompt_lens
from kvspan.bench.records import SCHEMA, Header, RecordWriter
from kvspan.bench.workloads import PromptSource, QuickPlan, real_text
from kvspan.commands.command import CommandFailed
from kvspan.commands.flags import SETTINGS
from kvspan.commands.pair import ChildEnded, Pair
from kvspan.commands.remote import told_failures, wait_serving
from kvspan.commands.up import make_plan

if TYPE_CHECKING:
    from kvspan.client import AsyncClient

READY_LIMIT_S = 600.0
"""How long fetching, loading and the first session may take."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that a run works with, once all of it is ready."""

    plan: QuickPlan
    client: AsyncClient
    baseline: Baseline
    prompts: PromptSource
    pids: Mapping[str, int]
    writer: RecordWriter


async def run_quick(plan: QuickPlan, services: Mapping[str, Any], folder: Path, writer: RecordWriter) -> None:
    """Take all samples; `services` are the settings of both services, `folder` is for their sockets.

    Raises CommandFailed when a service or the baseline ends or refuses.
    """
    environment = describe_environment()
    async with AsyncExitStack() as stack:
        with told_failures():
            bench = await _open(stack, plan, services, folder, writer)
            writer.begin(await _header(bench, services, environment))
            await _measure_transfers(bench)
            for lanes in plan.lanes:
                await _measure_decode(bench, lanes)
            await _measure_idle(bench)


async def _open(
    stack: AsyncExitStack, plan: QuickPlan, services: Mapping[str, Any], folder: Path, writer: RecordWriter
) -> Bench:
    """Start the baseline, tokenise, start the pair and connect to it."""
    from kvspan.client import AsyncClient

    _note("starting the baseline and a pair ...")
    threads = resolve_threads(services["threads"])
    baseline = await stack.enter_async_context(
        await Baseline.start(services["model"], services["dtype"], threads)
    )
    prompts = PromptSource(await baseline.tokenise(real_text()))
    settings = {**services, "listen": f"unix:{folder}/decode.sock"}
    pair = await stack.enter_async_context(Pair(make_plan(settings, f"unix:{folder}/prefill.sock")))
    try:
        async with asyncio.timeout(READY_LIMIT_S):
            address, _ = await pair.read_addresses()
            await wait_serving(address, REMOTE_HEALTH)
    except ChildEnded as ended:
        raise ended.failure() from ended
    except TimeoutError:
        raise CommandFailed(f"no session within {READY_LIMIT_S:g} s") from None
    client = await stack.enter_async_context(AsyncClient(address))
    return Bench(plan, client, baseline, prompts, pair.pids, writer)


async def _header(bench: Bench, services: Mapping[str, Any], environment: dict[str, Any]) -> Header:
    told = await bench.client.capabilities()
    return Header(
        schema=SCHEMA,
        command="quick",
        started_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment,
        plan=dataclasses.asdict(bench.plan),
        services={
            **{name: setting_text(SETTINGS[name], value) for name, value in services.items()},
            "numerics": told.identity.numerics.engine,
            "linears": told.linears,
            "threads": told.num_threads,
        },
    )


async def _measure_transfers(bench: Bench) -> None:
    for num_tokens in bench.plan.prompts:
        for round_index in bench.plan.rounds:
            _note(f"first token of {num_tokens} tokens, {_round_text(round_index)}")
            for position, arm in enumerate(in_order(ARMS, round_index)):
                prompt = bench.prompts.take(num_tokens)
                turn = (round_index, position)
                bench.writer.write(await measure.measure_transfer(bench.client, arm, prompt, turn))
                await measure.wait_idle(bench.client)


async def _measure_decode(bench: Bench, lanes: int) -> None:
    """Alternate between the pair and the baseline, which gets the mean context that the pair had."""
    plan, tokens_before = bench.plan, (0,) * lanes
    context = plan.context
    for round_index in plan.rounds:
        _note(f"decode of {lanes} lanes, {_round_text(round_index)}")
        lens = prompt_lens(plan.context, tokens_before)
        for decoder in in_order(DECODERS, round_index):
            if decoder == KVSPAN:
                prompts = [bench.prompts.take(length) for length in lens]
                interval = await measure.measure_lanes(bench.client, prompts, plan.steps)
                bench.writer.write(measure.lanes_sample(interval, lanes, round_index))
                tokens_before, context = interval.tokens_before, round(interval.context_tokens)
            else:
                batch = [bench.prompts.take(context - 2) for _ in range(lanes)]
                bench.writer.write(
                    await measure.measure_generate(bench.baseline, batch, plan.steps, round_index)
                )


async def _measure_idle(bench: Bench) -> None:
    _note("idle")
    for round_index in range(bench.plan.repetitions):
        bench.writer.write(await measure.measure_idle(bench.pids, bench.plan.idle_s, round_index))


def _round_text(round_index: int) -> str:
    return "warm-up" if round_index < 0 else f"round {round_index + 1}"


def _note(text: str) -> None:
    print(f"kvspan: {text}", file=sys.stderr, flush=True)
