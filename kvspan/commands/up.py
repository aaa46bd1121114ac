"""The command `up`: a prefill and a decode service on this host, as one thing.

Theory of operation: clients reach decode at `--listen`; prefill listens on a unix socket in a directory that
only this user can enter and that is removed at the end. `ready decode=ADDR prefill=ADDR` is told on stdout
when both serve and the session between them is open.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.runtime import Lifecycle
from decode_service.config import DecodeConfig
from kvspan.commands.command import EXIT_FAILED, EXIT_USAGE, Command, CommandFailed
from kvspan.commands.flags import add_flags, arguments_of, build_config, given_texts, parse_flag
from kvspan.commands.health import DECODE_SERVICE, wait_serving
from kvspan.commands.pair import ChildEnded, Pair, PairPlan, service_command
from kvspan.commands.remote import told_failures
from kvspan.commands.services import add_log_flags, log_arguments
from kvspan.commands.values import positive
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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, DecodeConfig, PrefillConfig, without=("prefill",), defaults=DEFAULTS)
    add_log_flags(parser)
    parser.add_argument(
        "--ready-timeout-s",
        default="300",
        metavar="SECONDS",
        help="how long loading and the first session may take (default: 300)",
    )


def _run(arguments: argparse.Namespace) -> int:
    ready_timeout_s = parse_flag("--ready-timeout-s", positive, arguments.ready_timeout_s)
    with tempfile.TemporaryDirectory(prefix="kvspan-") as folder:
        plan = make_plan(arguments, f"unix:{folder}/prefill.sock")
        return asyncio.run(run_pair(plan, ready_timeout_s, _announce))


def make_plan(arguments: argparse.Namespace, prefill_address: str) -> PairPlan:
    """Return how to start both services; raises ConfigError for what either would refuse."""
    texts = given_texts(arguments)
    decode_texts = texts | {"prefill": [prefill_address]} | _journal_of("decode", texts)
    prefill_texts = texts | {"listen": prefill_address} | _journal_of("prefill", texts)
    decode = build_config(DecodeConfig, decode_texts)
    build_config(PrefillConfig, prefill_texts)
    logs = log_arguments(arguments)
    return PairPlan(
        decode_command=service_command("decode", [*arguments_of(DecodeConfig, decode_texts), *logs]),
        prefill_command=service_command("prefill", [*arguments_of(PrefillConfig, prefill_texts), *logs]),
        kill_after_s=decode.grace_s + KILL_MARGIN_S,
    )


def _journal_of(service: str, texts: Mapping[str, Any]) -> dict[str, str]:
    """Return where a service of the pair writes its own journal: run.jsonl is run.decode.jsonl for decode."""
    if not texts.get("journal"):
        return {}
    path = Path(texts["journal"])
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
                await wait_serving(decode, DECODE_SERVICE)
            await use(PairReady(decode, prefill, lifecycle.ending))

        async with pair:
            try:
                with told_failures():
                    return await pair.run(lifecycle.ending, announce)
            except ChildEnded as ended:
                exit_code = EXIT_USAGE if ended.returncode == EXIT_USAGE else EXIT_FAILED
                raise CommandFailed(f"{ended}; the pair ends with it", exit_code) from ended
            except TimeoutError:
                raise CommandFailed(f"no session within {ready_timeout_s:g} s; the pair ends") from None


async def _announce(ready: PairReady) -> None:
    print(f"ready decode={ready.decode} prefill={ready.prefill}", flush=True)


UP = Command("up", "run a prefill and a decode service together on this host", _add_arguments, _run)
