"""A record file holds every sample as it was measured, and says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from kvspan.bench.records import RecordWriter, Run, read_run
from tests.support.bench_samples import DECODE, IDLE, TRANSFER, make_header


def write(path: Path) -> None:
    """Write a record with one sample of each kind."""
    with RecordWriter(path) as writer:
        writer.begin(make_header())
        for sample in (TRANSFER, DECODE, IDLE):
            writer.write(sample)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Nothing is rounded, averaged or left out."""
    write(tmp_path / "run.jsonl")

    assert read_run(tmp_path / "run.jsonl") == Run(make_header(), (TRANSFER, DECODE, IDLE))


def test_sample_is_in_the_file_before_the_next_one_is_taken(tmp_path: Path) -> None:
    """A run that is interrupted keeps what it has."""
    path = tmp_path / "run.jsonl"

    with RecordWriter(path) as writer:
        writer.begin(make_header())
        writer.write(IDLE)

        assert read_run(path).samples == (IDLE,)


def test_record_is_never_written_over(tmp_path: Path) -> None:
    """What was measured once stays."""
    write(tmp_path / "run.jsonl")

    with pytest.raises(FileExistsError):
        RecordWriter(tmp_path / "run.jsonl")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no header"),
        ("no JSON\n", "Expecting value"),
        ('{"kind": "idle"}\n', "no header"),
        ('{"kind": "header"}\n', "missing"),
    ],
)
def test_other_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """A report is never made from half a record."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)

    with pytest.raises(ConfigError, match=problem):
        read_run(path)


def test_record_of_another_schema_is_refused(tmp_path: Path) -> None:
    """Fields whose meaning has changed are not mixed."""
    path = tmp_path / "run.jsonl"
    write(path)
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 77'))

    with pytest.raises(ConfigError, match="schema is 77"):
        read_run(path)


def test_time_outside_is_what_no_stage_covers() -> None:
    """500 ms at the client, 485 ms in stages."""
    assert TRANSFER.outside_s == pytest.approx(0.015)


def test_rate_counts_the_tokens_of_all_lanes() -> None:
    """12 tokens in 0.3 s."""
    assert DECODE.tokens_per_s == pytest.approx(40)


def test_idle_cores_are_those_of_both_services() -> None:
    """30 and 20 ms of 5 s."""
    assert IDLE.cores == pytest.approx(0.01)
