"""Tests of the journal: its lines, their chain, and what a life finds in the file of an earlier one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.kv.ranges import Range
from common.kv.spans import Span
from common.telemetry.journal import (
    FIRST_CHAIN,
    Event,
    Journal,
    NullJournal,
    chained,
    open_journal,
    page_runs,
    span_fields,
    split_line,
)
from tests.support.places import full_disk

BOOT = "b007"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where no journal is yet."""
    return tmp_path / "journal.jsonl"


def write(path: Path, *numbers: int, boot: str = BOOT) -> None:
    """Let one life write a line per number."""
    with Journal(path, boot, lambda: 17) as journal:
        for number in numbers:
            journal.record(Event.SLOT_FREED, {"peer": "bee7", "slot": number})


def assert_chained(lines: list[bytes]) -> None:
    """Check number and chain of whole lines."""
    chain = FIRST_CHAIN
    for expected, line in enumerate(lines, start=1):
        parts = split_line(line)
        assert parts is not None, line
        body, number, own = parts
        assert (number, own) == (expected, chained(chain, body))
        chain = own


def test_line_says_number_time_event_and_both_boot_ids(path: Path) -> None:
    """Each line is one JSON object that can be read alone."""
    write(path, 5)

    fields = json.loads(path.read_bytes())
    assert fields.pop("chain")
    assert fields == {"n": 1, "t": 17, "event": "slot.freed", "boot": BOOT, "peer": "bee7", "slot": 5}


def test_lines_are_chained(path: Path) -> None:
    """A line's chain depends on every line before it."""
    write(path, 5, 6, 7)

    assert_chained(path.read_bytes().splitlines())


def test_line_is_in_the_file_once_it_is_recorded(path: Path) -> None:
    """A process that is killed loses at most the line it was writing: nothing waits in a buffer."""
    with Journal(path, BOOT, lambda: 17) as journal:
        journal.record(Event.SLOT_FREED, {"peer": "", "slot": 5})

        assert path.read_bytes().endswith(b"}\n")
        assert (journal.statistics().num_lines, journal.statistics().num_bytes) == (1, path.stat().st_size)


def test_journal_is_for_its_owner_alone(path: Path) -> None:
    """What a service did is not for every user of the host."""
    write(path, 5)

    assert path.stat().st_mode & 0o777 == 0o600


def test_later_life_goes_on_with_number_and_chain(path: Path) -> None:
    """The end of an earlier life cannot be cut off without a trace once another life has begun."""
    write(path, 5, 6)
    write(path, 7, boot="b008")

    assert_chained(path.read_bytes().splitlines())


def test_later_life_finds_the_last_line_however_long_it_is(path: Path) -> None:
    """A line of a prompt with scattered pages can be longer than one look at the end of the file."""
    with Journal(path, BOOT, lambda: 17) as journal:
        journal.record(
            Event.RESERVATION_MADE, {"peer": "", "pages": [[n, n + 1] for n in range(0, 40_000, 2)]}
        )
    write(path, 7)

    assert path.stat().st_size > 3 << 16
    assert_chained(path.read_bytes().splitlines())


@pytest.mark.parametrize("whole", [1, 0])
def test_later_life_ends_a_torn_line(path: Path, whole: int) -> None:
    """A kill may tear the last line; what follows begins on a line of its own."""
    write(path, *range(5, 5 + whole))
    with path.open("ab") as file:
        file.write(b'{"n":2,"t":3,"ev')
    write(path, 7)

    lines = path.read_bytes().splitlines()
    assert lines.pop(whole) == b'{"n":2,"t":3,"ev'
    assert_chained(lines)


def test_file_that_is_no_journal_is_refused(path: Path) -> None:
    """A wrong path must not grow lines at the end of somebody's file."""
    path.write_bytes(b"dear diary\n")

    with pytest.raises(ConfigError, match="not a journal"):
        write(path, 5)

    assert path.read_bytes() == b"dear diary\n"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "is there and is not a file"),
        (Path.mkdir, "is there and is not a file"),
        (lambda path: path.symlink_to(path.with_name("other")), "is a link; name the file that it leads to"),
        (lambda path: path.symlink_to("/dev/null"), "is a link; name the file that it leads to"),
    ],
    ids=["fifo", "folder", "dangling link", "link"],
)
def test_what_is_no_file_is_refused(path: Path, make: Callable[[Path], object], problem: str) -> None:
    """Nothing waits for a reader, and nothing is made or changed where a link leads to."""
    make(path)

    with pytest.raises(ConfigError, match=f"^journal=.*: {problem}"):
        write(path, 5)

    assert os.listdir(path.parent) == [path.name]


def test_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """An operator learns of a wrong path at start."""
    with pytest.raises(ConfigError, match="No such file"):
        write(tmp_path / "nowhere" / "journal", 5)


def test_second_process_is_refused(path: Path) -> None:
    """Two writers would break the chain of each other."""
    code = (
        "import sys; from pathlib import Path; from common.telemetry.journal import Journal\n"
        "Journal(Path(sys.argv[1]), 'b008', lambda: 0)"
    )
    with Journal(path, BOOT, lambda: 17):
        second = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).resolve().parents[4],
        )

    assert "is written by another process" in second.stderr
    write(path, 5)


def test_full_disk_ends_the_journal_and_not_the_service(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record that cannot be written is lost with a word in the log; requests go on."""
    with Journal(path, BOOT, lambda: 17) as journal, full_disk(0):
        journal.record(Event.SLOT_FREED, {"peer": "", "slot": 5})
        journal.record(Event.SLOT_FREED, {"peer": "", "slot": 6})

    assert [record.message for record in caplog.records] == ["journal.lost"]
    assert (journal.statistics().num_lines, journal.statistics().is_lost) == (0, True)


def test_disk_that_is_full_when_a_torn_line_must_be_ended_is_a_refusal(path: Path) -> None:
    """The next line would hang on to what an earlier life left; it is found at start."""
    path.write_bytes(b'{"n":1,"ev')

    with full_disk(path.stat().st_size), pytest.raises(ConfigError, match=r"^journal=.*File too large"):
        Journal(path, BOOT, lambda: 17)


def test_closed_journal_writes_nothing(path: Path) -> None:
    """What comes after the end of a life is not part of it."""
    journal = Journal(path, BOOT, lambda: 17)
    journal.close()
    journal.close()

    journal.record(Event.SLOT_FREED, {"peer": "", "slot": 5})

    assert path.read_bytes() == b""


def test_no_path_gives_a_journal_that_is_off(path: Path) -> None:
    """Off is the default and makes no file."""
    journal = open_journal("", BOOT, lambda: 17)

    journal.record(Event.SLOT_FREED, {"peer": "", "slot": 5})

    assert isinstance(journal, NullJournal)
    journal.close()
    with Journal(path, BOOT, lambda: 17) as on:
        assert isinstance(on, Journal)


def test_pages_are_written_as_runs() -> None:
    """A long run of pages takes no more room than a short one."""
    assert page_runs((3, 4, 5, 9, 7, 8)) == [[3, 6], [9, 10], [7, 9]]


def test_span_is_written_whole_and_without_times() -> None:
    """Both sides describe a span in the same words, so that they can be compared."""
    told = Span(21, 2, 3, 4, 5, 1, Range(0, 2), Range(6, 9), 4096, 128, b"\xab", 77, 78)

    assert span_fields(told) == {
        "transfer": 21,
        "attempt": 2,
        "slot": 3,
        "generation": 4,
        "sequence": 5,
        "group": 1,
        "layers": [0, 2],
        "tokens": [6, 9],
        "offset": 4096,
        "length": 128,
        "digest": "ab",
    }
