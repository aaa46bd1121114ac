"""The command `audit`: replay journals and name every rule that was broken; exit code 0 when none was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from kvspan.audit.replay import Report, audit_files
from kvspan.commands.command import EXIT_FAILED, EXIT_OK


@click.group("audit")
def audit() -> None:
    """Check what the services recorded against the rules."""


@audit.command("journal")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="report as one JSON object")
@click.option(
    "--all-stopped",
    is_flag=True,
    help="every life must have ended in order: one that was killed, or still runs, is a breach",
)
def journal(files: tuple[str, ...], as_json: bool, all_stopped: bool) -> int:
    """Check the journals of both services of one host, of any number of lives, against the rules."""
    report = audit_files([Path(name) for name in files], all_stopped=all_stopped)
    print(json_text(report) if as_json else "\n".join(report_lines(report)))
    return EXIT_OK if report.is_clean else EXIT_FAILED


def report_lines(report: Report) -> Iterator[str]:
    """Yield the report for people: breaches, then counts and lives."""
    yield from map(str, report.findings)
    num_breaches = sum(report.breaches.values())
    if num_breaches > len(report.findings):
        yield f"and {num_breaches - len(report.findings)} more"
    yield f"{report.num_lines} lines, " + ", ".join(
        f"{count} {name}" for name, count in report.counts.items()
    )
    for life in report.lives:
        end = f"was killed or runs, held {life.num_held}" if life.was_killed else "stopped"
        yield f"{life.role} {life.boot} {end} ({life.last})"
    rules = ", ".join(f"{rule} {count}" for rule, count in report.breaches.items())
    yield f"broken: {rules}" if rules else "no rule was broken"


def json_text(report: Report) -> str:
    """Return the report as one line of JSON."""
    return json.dumps({"is_clean": report.is_clean, **asdict(report)})
