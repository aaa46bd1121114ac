"""The command `bench`: measure a pair on this host, or report what was measured.

`bench quick` writes two files of one name into `--output`: every sample (`.jsonl`) and the report (`.txt`).
`bench report FILE` makes the report again from the samples.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from decode_service.config import DecodeConfig
from kvspan.bench.quick import run_quick
from kvspan.bench.records import RecordWriter, read_run
from kvspan.bench.report import report_lines
from kvspan.bench.workloads import QuickPlan, smoke_plan
from kvspan.commands import values
from kvspan.commands.command import EXIT_OK, Command
from kvspan.commands.flags import add_flags, given_texts, parse_flag
from prefill_service.config import PrefillConfig

OWN = (
    "listen", "prefill", "lanes", "cache_tokens", "queue_limit", "max_new_tokens", "route", "transfer",
    "max_prompt_tokens", "time_limit_s",
)  # fmt: skip
"""Settings of the services that the plan decides."""

SMOKE_MODEL = "tiny:llama"


def counts(text: str) -> tuple[int, ...]:
    """Return whole numbers above 0, separated by commas."""
    return tuple(values.integer(1)(part) for part in text.split(","))


PLAN_FLAGS: tuple[tuple[str, Callable[[str], object], str, str], ...] = (
    ("prompts", counts, "TOKENS,...", "prompt lengths"),
    ("repetitions", values.integer(1), "COUNT", "rounds that count"),
    ("lanes", counts, "COUNT,...", "sizes of the decode batch"),
    ("context", values.integer(16), "TOKENS", "what a lane has seen when decode is timed"),
    ("steps", values.integer(1), "COUNT", "decode steps of a sample"),
    ("idle_s", values.positive, "SECONDS", "length of a look at the idle pair"),
)
"""Field of the plan, parser, placeholder, help."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    choices = parser.add_subparsers(metavar="WHAT", required=True)
    quick = choices.add_parser(
        "quick", help="time first tokens, transfer, decode and idling of a pair", allow_abbrev=False
    )
    add_flags(quick, DecodeConfig, PrefillConfig, without=OWN, defaults={"model": "demo", "threads": "1"})
    plan = QuickPlan()
    for name, _, placeholder, text in PLAN_FLAGS:
        default = getattr(plan, name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else f"{default:g}"
        quick.add_argument(
            _flag(name), dest=f"plan_{name}", metavar=placeholder, help=f"{text} (default: {shown})"
        )
    quick.add_argument(
        "--output", default="bench-results", metavar="DIR", help="where records go (default: %(default)s)"
    )
    quick.add_argument(
        "--quick-subset",
        action="store_true",
        help=f"one short round of everything with {SMOKE_MODEL}, to see that it runs",
    )
    quick.set_defaults(run_bench=_run_quick)
    report = choices.add_parser("report", help="report what a record holds", allow_abbrev=False)
    report.add_argument("file", metavar="FILE", help="a record (.jsonl)")
    report.set_defaults(run_bench=_run_report)


def _run_quick(arguments: argparse.Namespace) -> int:
    plan = make_quick_plan(arguments)
    services = service_texts(arguments, plan)
    record = _new_record(Path(arguments.output))
    with tempfile.TemporaryDirectory(prefix="kvspan-") as folder, RecordWriter(record) as writer:
        asyncio.run(run_quick(plan, services, Path(folder), writer))
    report = "\n".join(report_lines(read_run(record)))
    record.with_suffix(".txt").write_text(report + "\n", encoding="utf-8")
    print(report)
    print(f"\nsamples: {record}")
    return EXIT_OK


def _run_report(arguments: argparse.Namespace) -> int:
    print("\n".join(report_lines(read_run(Path(arguments.file)))))
    return EXIT_OK


def make_quick_plan(arguments: argparse.Namespace) -> QuickPlan:
    """Return the plan that the flags describe; raises ConfigError, by flag."""
    given: dict[str, Any] = {
        name: parse_flag(_flag(name), parse, text)
        for name, parse, _, _ in PLAN_FLAGS
        if (text := getattr(arguments, f"plan_{name}")) is not None
    }
    return replace(smoke_plan() if arguments.quick_subset else QuickPlan(), **given)


def service_texts(arguments: argparse.Namespace, plan: QuickPlan) -> dict[str, str]:
    """Return the settings of both services as texts: those given, and those that the plan decides."""
    given = given_texts(arguments)
    if arguments.quick_subset:
        given["model"] = SMOKE_MODEL
    defaults = {field.name: field.default for field in fields(DecodeConfig)}
    return {
        "dtype": str(defaults["dtype"]),
        **given,
        "lanes": str(plan.max_lanes),
        "cache_tokens": str(plan.cache_tokens),
        "max_prompt_tokens": str(max((*plan.prompts, plan.context))),
    }


def _new_record(folder: Path) -> Path:
    """Return the name of a record that is not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--output", folder, f"cannot be made: {error}") from error
    return folder / f"quick-{datetime.now(UTC):%Y%m%dT%H%M%S}.jsonl"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


BENCH = Command(
    "bench",
    "measure first tokens, transfer, decode and idling of a pair on this host",
    _add_arguments,
    lambda arguments: int(arguments.run_bench(arguments)),
)
