"""How a window slides over the pages of one request."""

import pytest

from common.errors import InvariantViolation
from common.kv.ranges import Range
from decode_service.cache.sequence_pages import SequencePages
from tests.support.factories import make_geometry, make_hybrid_geometry, paged

FULL = (11, 12, 13, 14, 15)
WINDOWED = (7, 2, 8)


def make_pages() -> SequencePages:
    """A prompt of 14 tokens: a window of 6 in pages 7, 2, 8 from page 2 on, and five full pages."""
    geometry = paged(make_hybrid_geometry(windows=(6, None)))
    return SequencePages(geometry, 14, (WINDOWED, FULL))


def test_tables_begin_where_the_next_token_begins_to_see() -> None:
    """Positions 9 to 13 are seen by position 14: page 2."""
    windowed, full = make_pages().tables

    assert (windowed.first_page, windowed.pages) == (2, WINDOWED)
    assert (full.first_page, full.pages) == (0, FULL)


def test_nothing_moves_while_a_position_has_a_row() -> None:
    """Pages 2 to 4 hold positions 8 to 19."""
    pages = make_pages()

    assert [pages.advance(position)[0].pages for position in range(14, 20)] == [WINDOWED] * 6


def test_no_group_moves_when_one_is_too_small() -> None:
    """Position 20 would slide the window, but the full group ends at 19: all groups or none."""
    pages = make_pages()
    before = pages.tables

    with pytest.raises(InvariantViolation, match="position 20"):
        pages.advance(20)

    assert pages.tables == before
    assert before[0].extent == Range(8, 20)


def test_pages_out_of_sight_go_to_the_end_when_a_position_has_no_row() -> None:
    """Position 20 sees from 15 on: page 2 becomes page 5, and what is still seen keeps its row."""
    pages = SequencePages(paged(make_geometry(window=6)), 14, (WINDOWED,))
    before = {position: pages.tables[0].row(position) for position in range(15, 20)}

    (table,) = pages.advance(20)

    assert (table.first_page, table.pages) == (3, (2, 8, 7))
    assert {position: table.row(position) for position in range(15, 20)} == before
    pages.check_integrity()


def test_a_position_beyond_a_full_reservation_is_our_bug() -> None:
    """A request never asks for more pages than it reserved, and never writes into another's."""
    pages = SequencePages(paged(make_geometry()), 5, ((3, 9),))

    with pytest.raises(InvariantViolation, match="position 8"):
        pages.advance(8)

    assert pages.tables[0].pages == (3, 9)


def test_a_jump_over_the_window_is_our_bug() -> None:
    """Positions come one after another; a table is never moved to pages it does not have."""
    pages = SequencePages(paged(make_geometry(window=6)), 3, ((3,),))

    with pytest.raises(InvariantViolation, match="position 9"):
        pages.advance(9)


def test_pages_never_change_while_tables_slide() -> None:
    """What is given back in the end is what was taken."""
    pages = SequencePages(paged(make_geometry(window=6)), 14, (WINDOWED,))
    for position in range(14, 60):
        pages.advance(position)
        pages.check_integrity()

    assert pages.pages == (WINDOWED,)
