"""The matrix is as large as promised, its cases are distinct, and a census tells what is too much."""

from __future__ import annotations

from tests.faults.cases import ROWS, SHORT_ROWS, expand
from tests.faults.checks import Census
from tests.faults.driver import FAULTS
from tests.faults.stage import GATES
from tests.faults.table import Verdict, table_lines

ALWAYS = ("idle", "before_welcome", "queued", "published", "decoding")


def test_the_full_matrix_has_at_least_two_hundred_cases() -> None:
    """Each case has a name of its own, and the short matrix is a part of the full one."""
    full = [str(case) for case in expand(ROWS)]

    assert len(full) >= 200
    assert len(set(full)) == len(full)
    assert {str(case) for case in expand(SHORT_ROWS)} <= set(full)


def test_every_row_names_a_fault_and_points_that_exist() -> None:
    """A row with a misspelt fault or point would fail at its turn, minutes into the run."""
    assert {row.fault for row in ROWS} == set(FAULTS)
    assert {point for row in ROWS for point in row.points} <= {*GATES, *ALWAYS}


def test_a_census_names_what_was_not_held_before() -> None:
    """Descriptors count by kind, so that one socket more is seen among equal ones."""
    before = Census(num_threads=3, descriptors=("slab", "socket"), num_slabs=1)
    after = Census(num_threads=5, descriptors=("slab", "socket", "socket"), num_slabs=2)

    assert after.excess(before) == "1 descriptors (socket); 2 threads; 2 slabs mapped, 1 before"
    assert before.excess(before) == ""


def test_the_table_counts_each_kind_of_failure() -> None:
    """A case that leaked is not counted as recovered."""
    verdicts = [Verdict("f", "one", "exact"), Verdict("f", "two", "exact", leaked=["a page"], seconds=2.0)]

    header, row, total = table_lines(verdicts)

    assert header.split()[1:7] == ["cases", "recovered", "leaked", "wrong", "hung", "seconds"]
    assert row.split()[:7] == ["f", "2", "1", "1", "0", "0", "2"]
    assert total.split()[:4] == ["all", "2", "1", "1"]
