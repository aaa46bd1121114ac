"""The command `bench`: measure a pair on this host, or report what was measured.

`bench quick` writes two files of one name into `--output`: every sample (`.jsonl`) and the report (`.txt`).
`bench report FILE` makes the report again from the samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from common.errors import ConfigError
from common.settings import MOST_TOKENS, SECONDS, TOKENS
from decode_service.config import DecodeConfig
from kvspan.bench.quick import run_quick
from kvspan.bench.records import RecordWriter, read_run
from kvspan.bench.report import report_lines
from kvspan.bench.workloads import QuickPlan, smoke_plan
from kvspan.commands.command import EXIT_OK
from kvspan.commands.flags import SETTINGS, flag_name, settings_of
from kvspan.commands.pair import socket_folder
from kvspan.commands.values import Integers
from prefill_service.config import PrefillConfig

F = TypeVar("F", bound=Callable[..., Any])

OWN = (
    "listen", "prefill", "lanes", "cache_tokens", "queue_limit", "max_new_tokens", "route", "transfer",
    "max_prompt_tokens", "time_limit_s", "log_level", "log_json",
)  # fmt: skip
"""Settings of the services that the plan decides."""

SMOKE_MODEL = "tiny:llama"


PLAN = QuickPlan()


def plan_option(name: str, kind: click.ParamType[Any], placeholder: str, text: str) -> Callable[[F], F]:
    """Return the option of one field of the plan, whose default is that of the plan."""
    default = getattr(PLAN, name)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else f"{default:g}"
    flags = flag_name(name), f"plan_{name}"
    return click.option(*flags, type=kind, metavar=placeholder, help=f"{text} (default: {shown})")


@click.group("bench")
def bench() -> None:
    """Measure first tokens, transfer, decode and idling of a pair on this host."""


@bench.command("quick")
@settings_of(DecodeConfig, PrefillConfig, without=OWN, defaults={"model": "demo", "threads": 1})
@plan_option("prompts", Integers(1), "TOKENS,...", "prompt lengths")
@plan_option("repetitions", TOKENS, "COUNT", "rounds that count")
@plan_option("lanes", Integers(1), "COUNT,...", "sizes of the decode batch")
@plan_option(
    "context", click.IntRange(16, MOST_TOKENS), "TOKENS", "what a lane has seen when decode is timed"
)
@plan_option("steps", TOKENS, "COUNT", "decode steps of a sample")
@plan_option("idle_s", SECONDS, "SECONDS", "length of a look at the idle pair")
@click.option("--output", default="bench-results", metavar="DIR", show_default=True, help="where records go")
@click.option(
    "--quick-subset",
    is_flag=True,
    help=f"one short round of everything with {SMOKE_MODEL}, to see that it runs",
)
def quick(output: str, quick_subset: bool, **given: Any) -> int:
    """Time first tokens, transfer, decode and idling of a pair."""
    plan = make_quick_plan(given, quick_subset)
    services = service_settings({**given, "model": SMOKE_MODEL} if quick_subset else given, plan)
    record = _new_record(Path(output))
    with socket_folder() as folder, RecordWriter(record) as writer:
        asyncio.run(run_quick(plan, services, Path(folder), writer))
    text = "\n".join(report_lines(read_run(record)))
    record.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    print(f"\nsamples: {record}")
    return EXIT_OK


@bench.command("report")
@click.argument("file")
def report(file: str) -> int:
    """Report what a record (.jsonl) holds."""
    print("\n".join(report_lines(read_run(Path(file)))))
    return EXIT_OK


def make_quick_plan(given: Mapping[str, Any], is_subset: bool) -> QuickPlan:
    """Return the plan that the flags describe."""
    changes = {name.removeprefix("plan_"): value for name, value in given.items() if name.startswith("plan_")}
    plan = smoke_plan() if is_subset else PLAN
    return replace(plan, **{name: value for name, value in changes.items() if value is not None})


def service_settings(given: Mapping[str, Any], plan: QuickPlan) -> dict[str, Any]:
    """Return the settings of both services: those given, and those that the plan decides."""
    return {
        **{name: value for name, value in given.items() if name in SETTINGS},
        "lanes": plan.max_lanes,
        "cache_tokens": plan.cache_tokens,
        "max_prompt_tokens": max((*plan.prompts, plan.context)),
        "log_level": "warning",
    }


def _new_record(folder: Path) -> Path:
    """Return the name of a record that is not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--output", folder, f"cannot be made: {error}") from error
    return folder / f"quick-{datetime.now(UTC):%Y%m%dT%H%M%S}.jsonl"
