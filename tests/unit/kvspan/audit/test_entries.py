"""Tests of how journals are read: fields, the chain, the end of lives, the order of several files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.kv.ranges import Range
from common.telemetry.journal import FIRST_CHAIN, Event, Journal, chained
from kvspan.audit import entries
from kvspan.audit.entries import Entry, LifeEnded, merge_files, read_entries
from kvspan.audit.findings import Findings, Place
from tests.support.journals import damaged


def write_life(path: Path, boot: str, times: Iterable[int], *, stops: bool = False) -> list[bytes]:
    """Let a life begin and write slot numbers at these times; return all lines of the file."""
    now = 0
    with Journal(path, boot, lambda: now) as journal:
        for now in times:
            event = Event.SLOT_FREED if journal.statistics().num_lines else Event.SERVICE_STARTED
            journal.record(event, {"peer": "", "slot": now})
        if stops:
            journal.record(Event.SERVICE_STOPPED, {"peer": ""})
    return path.read_bytes().splitlines(keepends=True)


def read(lines: Iterable[bytes]) -> tuple[list[Entry | LifeEnded], list[str]]:
    """Return the entries of a file and the breaches that were found in it."""
    findings = Findings()
    found = list(read_entries("f", lines, findings))
    return found, [f"{one.place.line} {one.rule}: {one.problem}" for one in findings.kept]


def make_entry(**fields: object) -> Entry:
    """Return an entry with these fields."""
    return Entry(Place("f", 1), 5, Event.SLOT_FREED, "b007", fields)


def test_whole_journal_is_in_order(tmp_path: Path) -> None:
    """Lines come as entries that know where they stand."""
    entries, problems = read(write_life(tmp_path / "j", "b007", [3, 5], stops=True))

    assert problems == []
    assert [entry.place.line for entry in entries] == [1, 2, 3]
    assert isinstance(entries[1], Entry)
    assert (entries[1].time_ns, entries[1].boot, entries[1].number("slot")) == (5, "b007", 5)


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        ("removed", ["2 CHAIN: line numbers 2 to 2 are missing before this line"]),
        ("doubled", ["3 CHAIN: line number 2 is repeated or moved, 3 is due"]),
        ("altered", ["2 CHAIN: the line, or the one before it, was altered"]),
        (
            "swapped",
            [
                "2 CHAIN: line numbers 2 to 2 are missing before this line",
                "3 CHAIN: line number 2 is repeated or moved, 4 is due",
            ],
        ),
    ],
)
def test_damage_to_a_line_is_named(damage: str, problems: list[str], tmp_path: Path) -> None:
    """The number tells a missing line from a repeated one, the digest an altered one; once each."""
    lines = write_life(tmp_path / "j", "b007", [3, 5, 7, 11], stops=True)

    assert read(damaged(lines, 1)[damage])[1][: len(problems)] == problems


def test_cut_end_is_seen_once_another_life_has_begun(tmp_path: Path) -> None:
    """A later life is chained to the last line of the one before."""
    write_life(tmp_path / "j", "b007", [3, 5, 7])
    lines = write_life(tmp_path / "j", "b008", [11])

    assert read(lines)[1] == []
    assert read([*lines[:2], *lines[3:]])[1] == ["3 CHAIN: line numbers 3 to 3 are missing before this line"]


def test_life_without_its_last_line_was_killed(tmp_path: Path) -> None:
    """The end of a life is told after its last line, also when another one follows in the file."""
    write_life(tmp_path / "j", "b007", [3, 5])
    entries, problems = read(write_life(tmp_path / "j", "b008", [7], stops=True))

    assert problems == []
    assert entries[2] == LifeEnded(Place("f", 2), 5, "b007")
    assert not any(isinstance(entry, LifeEnded) for entry in entries[3:])


@pytest.mark.parametrize("goes_on", [False, True])
def test_line_torn_by_a_kill_is_no_breach(goes_on: bool, tmp_path: Path) -> None:
    """A process that is killed may leave its last line unfinished."""
    lines = write_life(tmp_path / "j", "b007", [3, 5])
    (tmp_path / "j").write_bytes(b"".join(lines)[:-9])
    if goes_on:
        lines = write_life(tmp_path / "j", "b008", [7], stops=True)
    else:
        lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)

    entries, problems = read(lines)

    assert problems == []
    assert entries[1] == LifeEnded(Place("f", 1), 3, "b007")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_line_torn_in_a_life_is_a_breach(index: int, tmp_path: Path) -> None:
    """A kill explains a torn line only where the lines of a life end, and without a line break."""
    lines = write_life(tmp_path / "j", "b007", [3, 5, 7])
    lines[index] = lines[index][:20] + b"\n"

    assert f"{index + 1} CHAIN: the line has no readable end" in read(lines)[1]


def test_unknown_event_is_named(tmp_path: Path) -> None:
    """A journal of another version is not passed over in silence."""
    lines = write_life(tmp_path / "j", "b007", [3, 5])
    findings = Findings()

    list(read_entries("f", [lines[0].replace(b"service.started", b"service.fainted")], findings))

    assert findings.counts == {"CHAIN": 1, "FORMAT": 1}


def test_files_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    """What one side did before the other comes before it."""
    write_life(tmp_path / "a", "b007", [3, 11, 12], stops=True)
    write_life(tmp_path / "b", "b008", [5, 7, 13], stops=True)

    entries = list(merge_files([tmp_path / "b", tmp_path / "a"], Findings()))

    assert [entry.time_ns for entry in entries] == [3, 5, 7, 11, 12, 12, 13, 13]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused(make: Callable[[Path], object], tmp_path: Path) -> None:
    """A FIFO would wait for ever, a device never end."""
    make(tmp_path / "journal")

    with pytest.raises(ConfigError, match=r"is not a file|Is a directory"):
        list(merge_files([tmp_path / "journal"], Findings()))


def test_line_that_never_ends_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without line breaks takes no more memory than a line may have; none of it is one."""
    monkeypatch.setattr(entries, "LONGEST_LINE", 7)
    (tmp_path / "journal").write_bytes(b"x" * 30)
    findings = Findings()

    assert list(merge_files([tmp_path / "journal"], findings)) == []
    assert findings.counts == {"CHAIN": 4}


@pytest.mark.parametrize("value", ["[" * 100_000 + "]" * 100_000, "1e999", "NaN", '"7"x'])
def test_line_that_no_number_or_stack_can_hold_is_named(value: str) -> None:
    """Its chain is right, as that of whoever means harm can be."""
    body = b'{"n":1,"t":%s,"event":"slot.freed","boot":"b"' % value.encode()
    line = b'%s,"chain":"%s"}\n' % (body, chained(FIRST_CHAIN, body).hex().encode())

    read_well, (problem,) = read([line])

    assert read_well == []
    assert problem.startswith("1 FORMAT: the line cannot be read: ")


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A wrong name is not an empty journal."""
    with pytest.raises(ConfigError, match="No such file"):
        list(merge_files([tmp_path / "nowhere"], Findings()))


def test_fields_are_read_by_kind() -> None:
    """Ranges, lists and pairs come as what they mean."""
    entry = make_entry(name="x", ranges=[[3, 5]], lists=[[[0, 2]], []], pairs=[[7, 2]], numbers=[4, 6])

    assert entry.text("name") == "x"
    assert entry.ranges("ranges") == (Range(3, 5),)
    assert entry.range_lists("lists") == ((Range(0, 2),), ())
    assert entry.pairs("pairs") == ((7, 2),)
    assert entry.numbers("numbers") == (4, 6)


@pytest.mark.parametrize("value", ["7", 7.5, True, None, [7]])
def test_number_of_another_kind_is_refused(value: object) -> None:
    """What is not a whole number is not taken for one."""
    with pytest.raises(ValueError, match="slot must be a whole number"):
        make_entry(slot=value).number("slot")


@pytest.mark.parametrize("value", [7, [7], [7, 8, 9], [8, 7], ["a", "b"], [-1, 4]])
def test_range_of_another_kind_is_refused(value: object) -> None:
    """A range is two whole numbers in order."""
    with pytest.raises(ValueError, match=r"must be|needs"):
        make_entry(tokens=value).range("tokens")


def test_missing_field_is_named() -> None:
    """Who reads the finding learns what the line lacks."""
    with pytest.raises(ValueError, match="slot is missing"):
        make_entry().number("slot")
