"""`kvspan bench` turns flags into a plan, runs it, and reports from the record alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from kvspan import cli
from kvspan.bench.command import make_quick_plan, quick, service_settings
from kvspan.bench.records import RecordWriter, TransferSample, read_run
from kvspan.commands.command import EXIT_OK, EXIT_USAGE
from tests.support.bench_samples import TRANSFER, make_header
from tests.support.command_lines import parse_line


def parse(*line: str) -> dict[str, Any]:
    """Return what a command line gives to `bench quick`."""
    return parse_line(quick, line)


def test_flags_change_the_plan() -> None:
    """What is not given keeps its default."""
    plan = make_quick_plan(parse("--prompts=7,300", "--lanes=3", "--repetitions=9"), False)

    assert (plan.prompts, plan.lanes, plan.repetitions, plan.context) == ((7, 300), (3,), 9, 512)


def test_bad_value_is_refused_by_its_flag() -> None:
    """Nothing is started for it."""
    with pytest.raises(click.BadParameter, match="0 is not in the range 1<=x"):
        parse("--prompts=7,0")


def test_services_get_one_thread_each_unless_told_otherwise() -> None:
    """Two teams of threads on two cores would measure each other."""
    given = parse("--dtype=float32")

    settings = service_settings(given, make_quick_plan(given, False))

    assert (settings["model"], settings["dtype"], settings["threads"]) == ("demo", "float32", 1)


def test_services_have_room_for_the_plan() -> None:
    """Lanes, pages and the longest prompt follow from what is measured."""
    given = parse("--prompts=7,300", "--lanes=3,2", "--context=50")

    settings = service_settings(given, make_quick_plan(given, False))

    assert (settings["lanes"], settings["max_prompt_tokens"], settings["cache_tokens"]) == (3, 300, 3222)


def test_report_is_made_from_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody else's record can be read on any machine."""
    with RecordWriter(tmp_path / "run.jsonl") as writer:
        writer.begin(make_header())
        writer.write(TRANSFER)

    assert cli.main(["bench", "report", str(tmp_path / "run.jsonl")]) == EXIT_OK
    assert "Abacus 7" in capsys.readouterr().out


def test_report_of_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says that the argument is wrong."""
    (tmp_path / "other").write_text("{}")

    assert cli.main(["bench", "report", str(tmp_path / "other")]) == EXIT_USAGE
    assert "is no record of a run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("leak_check")
def test_smoke_run_passes_through_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pair and baseline are started, every kind of sample is recorded, and no process is left."""
    line = ["bench", "quick", "--quick-subset", "--prompts=24", "--lanes=2", f"--output={tmp_path}"]

    assert cli.main([*line, "--dtype=float32"]) == EXIT_OK

    (record,) = tmp_path.glob("*.jsonl")
    samples = read_run(record).samples
    arms = [s.arm for s in samples if isinstance(s, TransferSample) and s.round_index == 0]
    assert sorted(arms) == ["deferred", "local", "stream", "stream_again", "whole"]
    assert {json.loads(line)["kind"] for line in record.read_text().splitlines()} == {
        "header", "transfer", "decode", "idle",
    }  # fmt: skip
    assert record.with_suffix(".txt").read_text() in capsys.readouterr().out
