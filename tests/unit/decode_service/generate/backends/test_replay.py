"""A backend without a model: what does not match the pattern is no KV."""

from __future__ import annotations

import numpy as np
import pytest

from common.engine.checks import check_backend
from common.engine.decode import KVPlace, LaneStep
from common.engine.replay import Pattern
from common.errors import EngineFailed
from common.kv.ranges import Range
from common.kv.tables import PageTable
from decode_service.generate.backends.replay import ReplayBackend, make_backend
from tests.support.setups import make_setup

OPTIONS = ("layers=3", "kv_heads=2", "head_dim=8", "dtype=float32", "vocab=11")
PLACE = KVPlace(0, PageTable(4, 1, (2, 0)), Range(5, 9))


def make(*options: str) -> ReplayBackend:
    """Return a small backend with three pages of four tokens."""
    backend = make_backend(make_setup("none", (*OPTIONS, *options)))
    check_backend("backend", "replay", backend)
    backend.allocate(4, [3])
    return backend


def rows(backend: ReplayBackend, kind: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Return what the engine makes of layer 2."""
    return Pattern(backend.identity().geometry.groups[0]).rows(2, kind, PLACE.tokens)


@pytest.mark.parametrize("store", ["on", "off"])
def test_rows_of_the_pattern_are_taken(store: str) -> None:
    """Into pages, or nowhere."""
    backend = make(f"store={store}")

    backend.write(PLACE, 2, rows(backend, 0), rows(backend, 1))


def test_a_wrong_row_is_named() -> None:
    """By its layer and position."""
    backend = make()
    values = rows(backend, 1)
    values[2, 1, 3] += np.uint64(1)

    with pytest.raises(EngineFailed, match="values of layer 2, position 7: not the pattern"):
        backend.write(PLACE, 2, rows(backend, 0), values)


def test_nothing_is_compared_when_that_is_off() -> None:
    """To measure the way alone."""
    backend = make("check=off")

    backend.write(PLACE, 2, rows(backend, 1), rows(backend, 0))


def test_tokens_count_up() -> None:
    """Whatever lies in the pages."""
    batch = [LaneStep(token, 5, (PLACE.table,)) for token in (3, 10)]

    assert make().step(batch).argmax(axis=1).tolist() == [4, 0]
