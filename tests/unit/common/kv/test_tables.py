"""Where positions lie in pages of 4 tokens."""

import pytest

from common.kv.ranges import Range
from common.kv.tables import PageTable


@pytest.fixture
def table() -> PageTable:
    """Logical pages 2, 3, 4, 5 in physical pages 7, 8, 1, 2: positions 8 to 23."""
    return PageTable(page_tokens=4, first_page=2, pages=(7, 8, 1, 2))


def test_the_extent_has_the_positions_that_have_a_row(table: PageTable) -> None:
    """A windowed group has dropped the pages in front."""
    assert table.extent == Range(8, 24)


@pytest.mark.parametrize(("position", "row"), [(8, 28), (11, 31), (12, 32), (16, 4), (23, 11)])
def test_a_row_is_page_times_size_plus_offset(table: PageTable, position: int, row: int) -> None:
    """The mapping is explicit and follows the physical page."""
    assert table.row(position) == row


@pytest.mark.parametrize("position", [0, 7, 24, 40])
def test_a_row_is_refused_when_the_position_is_outside(table: PageTable, position: int) -> None:
    """A dropped or not yet held position never folds back onto a held page."""
    with pytest.raises(KeyError, match=str(position)):
        table.row(position)


@pytest.mark.parametrize(
    ("tokens", "runs"),
    [
        (Range(8, 16), (Range(28, 36),)),
        (Range(10, 14), (Range(30, 34),)),
        (Range(8, 24), (Range(28, 36), Range(4, 12))),
        (Range(13, 17), (Range(33, 36), Range(4, 5))),
        (Range(9, 11), (Range(29, 31),)),
    ],
)
def test_runs_merge_when_pages_are_next_to_each_other(
    table: PageTable, tokens: Range, runs: tuple[Range, ...]
) -> None:
    """Physically adjacent rows are one copy; a jump begins another."""
    assert table.runs(tokens) == runs


def test_runs_do_not_merge_when_pages_are_in_reverse_order() -> None:
    """Adjacent pages in the wrong order are two runs."""
    assert PageTable(4, 0, (6, 5)).runs(Range(0, 8)) == (Range(24, 28), Range(20, 24))


def test_runs_are_empty_when_no_position_is_asked_for(table: PageTable) -> None:
    """Nothing to copy is not an error, wherever the empty range lies."""
    assert table.runs(Range(8, 8)) == ()
    assert table.runs(Range(30, 30)) == ()


@pytest.mark.parametrize("tokens", [Range(7, 9), Range(23, 25), Range(0, 4), Range(30, 31)])
def test_runs_are_refused_when_a_position_is_outside(table: PageTable, tokens: Range) -> None:
    """A copy never starts when part of it has no page."""
    with pytest.raises(KeyError, match="outside the extent"):
        table.runs(tokens)


def test_a_table_without_pages_has_no_row() -> None:
    """An empty extent answers with errors and not with page 0."""
    table = PageTable(4, 3, ())

    with pytest.raises(KeyError):
        table.row(12)
