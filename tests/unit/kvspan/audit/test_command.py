"""Tests of the command `audit journal`: what it says and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.telemetry.journal import Event
from kvspan.audit.command import report_lines
from kvspan.audit.findings import MAX_KEPT, Findings, Place
from kvspan.audit.replay import Report
from kvspan.cli import main
from tests.support.journals import make_story


def audit(directory: Path, *flags: str) -> int:
    """Run the command on the journals of a directory."""
    return main(["audit", "journal", *flags, *map(str, sorted(directory.glob("*.jsonl")))])


def test_journals_in_order_exit_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator reads what was audited and that nothing was broken."""
    make_story().write(tmp_path)

    assert audit(tmp_path) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("54 lines, 3 reservations, 2 published, 2 transfers, 1 aborted")
    assert lines[1].startswith("decode d0d0 stopped (")
    assert lines[-1] == "no rule was broken"


def test_broken_rule_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule comes with the file and the line that shows it."""
    story = make_story()
    story.remove(Event.RESERVATION_FREED, reservation=3)
    story.write(tmp_path)

    assert audit(tmp_path) == 1

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}/decode.jsonl:36: R9: ")
    assert lines[-1] == "broken: R9 1"


def test_report_can_be_read_by_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object holds what the text says."""
    story = make_story()
    story.remove(Event.SLAB_UNMAPPED)
    story.write(tmp_path)

    assert audit(tmp_path, "--json") == 1

    report = json.loads(capsys.readouterr().out)
    assert report["is_clean"] is False
    assert report["breaches"] == {"R9": 1}
    assert report["findings"][0]["place"]["file"].endswith("decode.jsonl")
    assert [life["boot"] for life in report["lives"]] == ["d0d0", "a1a1"]


def test_killed_life_is_said_and_can_be_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kill is no breach, unless the run was to end in order."""
    story = make_story()
    story.steps = story.steps[:9]
    story.write(tmp_path)

    assert audit(tmp_path) == 0
    assert "decode d0d0 was killed or runs, held 4 (" in capsys.readouterr().out
    assert audit(tmp_path, "--all-stopped") == 1


def test_file_that_is_not_there_is_a_wrong_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was audited, which is another exit code than a broken rule."""
    assert main(["audit", "journal", str(tmp_path / "nowhere")]) == 2

    assert "No such file" in capsys.readouterr().err


def test_findings_beyond_the_bound_are_counted() -> None:
    """A reader learns how many breaches are not shown."""
    findings = Findings()
    for line in range(MAX_KEPT + 3):
        findings.add("R5", Place("a", line), "told again")

    lines = list(report_lines(Report(9, (), {}, findings.kept, findings.counts)))

    assert lines[MAX_KEPT] == "and 3 more"
    assert lines[-1] == f"broken: R5 {MAX_KEPT + 3}"
