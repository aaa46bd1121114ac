"""The command `up`: a prefill and a decode service on this host, as one thing.

Theory of operation: clients reach decode at `--listen`; prefill listens on a unix socket in a directory that
only this user can enter and that is removed at the end. `ready decode=ADDR prefill=ADDR` is told on stdout
when both serve and the session between them is open.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from common.preflight import check_host
from common.runtime.lifecycle import Lifecycle
from common.settings import SECONDS, size_text
from decode_service.config import REMOTE_HEALTH, DecodeConfig
from kvspan.commands.command import CommandFailed, tell
from kvspan.commands.flags import arguments_of, make_config, settings_of
from kvspan.commands.pair import ChildEnded, Pair, PairPlan, service_command, socket_folder
from kvspan.commands.remote import longest_step_s, told_failures, wait_serving
from prefill_service.config import PrefillConfig

DEFAULTS = {"model": "demo", "listen": "127.0.0.1:50051"}
"""What a pair takes that a single service must be told."""


KILL_MARGIN_S = 5.0
"""Time beyond its grace after which a service is killed."""


@dataclass(frozen=True, slots=True)
class PairReady:
    """Where both services serve, and the event that ends them."""

    decode: str
    prefill: str
    ending: asyncio.Event


@click.command("up")
@settings_of(DecodeConfig, PrefillConfig, without=("prefill",), defaults=DEFAULTS)
@click.option(
    "--ready-timeout-s",
    type=SECONDS,
    default=300,
    metavar="SECONDS",
    show_default=True,
    help="how long loading and the first session may take",
)
def up(ready_timeout_s: float, **given: Any) -> int:
    """Run a prefill and a decode service together on this host."""
    with socket_folder() as folder:
        plan = make_plan(given, f"unix:{folder}/prefill.sock")
        return asyncio.run(run_pair(plan, ready_timeout_s, _announce))


def make_plan(given: Mapping[str, Any], prefill_address: str) -> PairPlan:
    """Return how to start both services; raises ConfigError for what either would refuse."""
    peers = {"prefill": (prefill_address,)}
    decode = make_config(DecodeConfig, {**given, **peers, **_journal_of("decode", given)})
    prefill = make_config(
        PrefillConfig, {**given, "listen": prefill_address, **_journal_of("prefill", given)}
    )
    limit = prefill.max_slab_bytes
    decode.require(decode.slab_bytes <= limit, "slab_bytes", f"--max-slab-bytes is {size_text(limit)}")
    for config in (decode, prefill):
        check_host(config)
    return PairPlan(
        decode_command=service_command("decode", arguments_of(decode)),
        prefill_command=service_command("prefill", arguments_of(prefill)),
        kill_after_s=decode.grace_s + KILL_MARGIN_S,
    )


def _journal_of(service: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Return where a service of the pair writes its own journal: run.jsonl is run.decode.jsonl for decode."""
    # A folder has no name to put a service into, and is refused by its own.
    if not given.get("journal") or os.path.isdir(given["journal"]):
        return {}
    path = Path(given["journal"])
    return {"journal": str(path.with_name(f"{path.stem}.{service}{path.suffix}"))}


async def run_pair(
    plan: PairPlan, ready_timeout_s: float, use: Callable[[PairReady], Awaitable[None]]
) -> int:
    """Run the pair, call `use` once its session is open, and return the exit code when it was told to end.

    Raises CommandFailed when a service ends by itself or the session does not open in time.
    """
    pair = Pair(plan)
    with Lifecycle(exit_now=lambda _: pair.hurry()) as lifecycle:

        async def announce() -> None:
            async with asyncio.timeout(ready_timeout_s):
                decode, prefill = await pair.read_addresses()
                await wait_serving(decode, REMOTE_HEALTH)
                pair.allow(await longest_step_s(prefill))
            await use(PairReady(decode, prefill, lifecycle.ending))

        async with pair:
            try:
                with told_failures():
                    return await pair.run(lifecycle.ending, announce)
            except ChildEnded as ended:
                raise ended.failure() from ended
            except TimeoutError:
                raise CommandFailed(f"no session within {ready_timeout_s:g} s; the pair ends") from None


async def _announce(ready: PairReady) -> None:
    tell(f"ready decode={ready.decode} prefill={ready.prefill}")
