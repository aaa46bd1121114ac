"""Pages of one group are never lost and never held twice, whatever the order of requests."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import InvariantViolation, PagesExhausted
from decode_service.cache.pool import PagePool

NUM_PAGES = 13


class PoolLife(RuleBasedStateMachine):
    """Takes and returns in any order, against a plain list of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(2, NUM_PAGES)
        self.held: list[tuple[int, ...]] = []

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def take(self, count: int) -> None:
        """Taken pages are nobody else's, and adjacent whenever a free run is long enough."""
        free = self.pool.num_free
        if count > free:
            with pytest.raises(PagesExhausted):
                self.pool.take(count)
            return
        longest = max(map(len, self.free_runs()), default=0)
        pages = self.pool.take(count)
        assert len(set(pages)) == count
        assert not set(pages) & {page for other in self.held for page in other}
        if 0 < count <= longest:
            assert pages == tuple(range(pages[0], pages[0] + count))
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """What is held can be returned, in any order, once."""
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.give_back(pages)
        if pages:
            with pytest.raises(InvariantViolation):
                self.pool.give_back(pages)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        """Held and free pages are all pages."""
        self.pool.check_integrity()
        assert self.pool.statistics().free == NUM_PAGES - sum(map(len, self.held))

    def free_runs(self) -> list[list[int]]:
        """Return the free pages by the model, adjacent ones together."""
        taken = {page for pages in self.held for page in pages}
        runs: list[list[int]] = []
        for page in sorted(set(range(NUM_PAGES)) - taken):
            if runs and runs[-1][-1] == page - 1:
                runs[-1].append(page)
            else:
                runs.append([page])
        return runs

    def teardown(self) -> None:
        """When everything is back, the pool is one run again."""
        for pages in self.held:
            self.pool.give_back(pages)
        assert self.pool.take(NUM_PAGES) == tuple(range(NUM_PAGES))


PoolLife.TestCase.settings = settings(max_examples=50)
TestPoolLife = PoolLife.TestCase
