"""Where the positions of one sequence lie in the pages of one group.

Theory of operation: a `PageTable` maps an extent of logical pages [first_page, first_page + len(pages))
to physical pages. A windowed group drops pages from the front and appends at the back; the mapping is
always explicit, never a modulo fold. A *row* is the place of one token: page * page_tokens + offset.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.ranges import Range


@dataclass(frozen=True, slots=True)
class PageTable:
    """The physical pages of an extent of logical pages."""

    page_tokens: int
    first_page: int
    """Logical index of pages[0]: position // page_tokens of its first token."""

    pages: tuple[int, ...]

    @property
    def extent(self) -> Range:
        """Return the positions that have a row."""
        return Range(
            self.first_page * self.page_tokens, (self.first_page + len(self.pages)) * self.page_tokens
        )

    def row(self, position: int) -> int:
        """Return the row of one position; `KeyError` when it has none."""
        logical, offset = divmod(position, self.page_tokens)
        index = logical - self.first_page
        if not 0 <= index < len(self.pages):
            raise KeyError(f"position {position} is outside the extent {self.extent}")
        return self.pages[index] * self.page_tokens + offset

    def runs(self, tokens: Range) -> tuple[Range, ...]:
        """Return the rows of `tokens` in order, physically adjacent rows merged into one run."""
        if not self.extent.contains(tokens):
            raise KeyError(f"positions {tokens} are outside the extent {self.extent}")
        runs: list[Range] = []
        position = tokens.start
        # From page to page; a run goes on only where the next page lies right behind in memory:
        #
        #     logical   |p7 : . x x x|p8 : x x x x|p2 : x x . .|
        #     rows      |29 .............. 36)|8 .. 10)    two runs, for pages of 4
        while position < tokens.stop:
            row = self.row(position)
            stop = min(tokens.stop, (position // self.page_tokens + 1) * self.page_tokens)
            end = row + stop - position
            if runs and runs[-1].stop == row:
                runs[-1] = Range(runs[-1].start, end)
            else:
                runs.append(Range(row, end))
            position = stop
        return tuple(runs)
