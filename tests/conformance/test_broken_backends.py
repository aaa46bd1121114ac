"""Backends that break one rule each: the check that is meant fails, and says what it saw."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.engine.decode import KVPlace, LaneStep
from common.engine.prefill import Logits
from common.errors import EngineFailed
from common.kv.geometry import KVGeometry
from common.kv.ranges import Range
from common.kv.writer import Rows
from kvspan.conformance import BACKEND_CHECKS, BackendSubject, CheckFailed
from kvspan.conformance.checks import outcome_of
from tests.support.factories import make_hybrid_geometry
from tests.support.fakes import CountingBackend

WAIT_S = 20.0

HYBRID = make_hybrid_geometry(windows=(20, None, 20))


class GoodBackend(CountingBackend):
    """Logits that are a function of the KV a sequence sees, kept in pages."""

    def __init__(self, geometry: KVGeometry = HYBRID, max_lanes: int = 4) -> None:
        super().__init__(geometry, max_lanes)

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """See `DecodeBackend`."""
        vocab_size = self.identity().geometry.vocab_size
        if any(lane.token_id >= vocab_size for lane in batch):
            raise EngineFailed("no such token")
        for lane in batch:
            self.put(lane)
        return np.stack([self.row(lane, batch) for lane in batch])

    def put(self, lane: LaneStep) -> None:
        """Write the KV of a token."""
        for group, table in zip(self.identity().geometry.groups, lane.tables, strict=True):
            rows = np.full(
                (1, group.num_kv_heads, group.row_bytes // group.num_kv_heads), lane.token_id, np.uint8
            )
            place = KVPlace(group.group_index, table, Range(lane.position, lane.position + 1))
            for layer in range(group.num_layers):
                super().write(place, layer, rows, rows)

    def seen(self, lane: LaneStep) -> list[np.ndarray[Any, Any]]:
        """Return the rows that a token sees, in order."""
        assert self.storage is not None
        parts = []
        for group, table in zip(self.identity().geometry.groups, lane.tables, strict=True):
            visible = self.visible(group, lane)
            for layer in range(group.num_layers):
                for kind in (0, 1):
                    rows = self.storage.rows(group.group_index, layer, kind)  # type: ignore[arg-type]
                    parts += [rows[table.row(position)] for position in visible]
        return parts

    def visible(self, group: Any, lane: LaneStep) -> Range:
        """Return the positions that a token sees, itself included."""
        return Range(group.visible(lane.position).start, lane.position + 1)

    def row(self, lane: LaneStep, batch: Sequence[LaneStep]) -> Logits:
        """Return the logits of a lane."""
        digest = np.concatenate(self.seen(lane)).astype(np.float64)
        weights = np.arange(1, len(digest) + 1) % 251
        total = float((digest * weights).sum() % 9973) + lane.token_id
        return np.full(self.identity().geometry.vocab_size, total, np.float32)


class Changing(GoodBackend):
    """Describes itself otherwise once it has room."""

    def describe(self) -> Any:
        """Say something else."""
        return replace(super().describe(), max_lanes=4 if self.storage is None else 5)


class Counting(GoodBackend):
    """Counts its steps in the logits."""

    def row(self, lane: LaneStep, batch: Sequence[LaneStep]) -> Logits:
        """Add a number that grows."""
        self._number = getattr(self, "_number", 0) + 1
        return super().row(lane, batch) + self._number


class Blind(GoodBackend):
    """Does not write the KV of its tokens."""

    def put(self, lane: LaneStep) -> None:
        """Leave it out."""


class Placed(GoodBackend):
    """Adds the number of a page."""

    def row(self, lane: LaneStep, batch: Sequence[LaneStep]) -> Logits:
        """Add it."""
        return super().row(lane, batch) + lane.tables[0].pages[0]


class Social(GoodBackend):
    """Adds the number of lanes."""

    def row(self, lane: LaneStep, batch: Sequence[LaneStep]) -> Logits:
        """Add it."""
        return super().row(lane, batch) + len(batch)


class Curious(GoodBackend):
    """Reads one row behind its token."""

    def seen(self, lane: LaneStep) -> list[np.ndarray[Any, Any]]:
        """Read on, to the end of the page."""
        assert self.storage is not None
        table = lane.tables[-1]
        rows = self.storage.rows(len(lane.tables) - 1, 0, 0)  # type: ignore[arg-type]
        return [*super().seen(lane), rows[table.row(min(lane.position + 1, table.extent.stop - 1))]]


class Narrow(GoodBackend):
    """Forgets the first position of its window."""

    def visible(self, group: Any, lane: LaneStep) -> Range:
        """Cut it."""
        whole = super().visible(group, lane)
        return Range(whole.start + (group.window is not None), whole.stop)


class Spilling(GoodBackend):
    """An import touches the first page, whoever has it."""

    def write(self, place: KVPlace, group_layer: int, keys: Rows, values: Rows) -> None:
        """Write there too."""
        super().write(place, group_layer, keys, values)
        if place.table.pages[0] > 2:
            assert self.storage is not None
            self.storage.rows(place.group_index, group_layer, 0)[16] = 1  # type: ignore[arg-type]


class Fragile(GoodBackend):
    """A step that failed leaves a mark."""

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """Remember it."""
        try:
            return super().step(batch) + getattr(self, "_mark", 0)
        except EngineFailed:
            self._mark = 1
            raise


class Torn(GoodBackend):
    """Imports are seen by steps that run beside them."""

    def __init__(self) -> None:
        super().__init__()
        self._torn = threading.Event()

    def write(self, place: KVPlace, group_layer: int, keys: Rows, values: Rows) -> None:
        """Remember an import of another thread."""
        super().write(place, group_layer, keys, values)
        if threading.current_thread().name == "conformance":
            self._torn.set()

    def row(self, lane: LaneStep, batch: Sequence[LaneStep]) -> Logits:
        """Show it; a step that comes before the first one waits."""
        is_beside = any(thread.name == "conformance" for thread in threading.enumerate())
        return super().row(lane, batch) + float(is_beside and self._torn.wait(WAIT_S))


BROKEN_BACKENDS = {
    "description": Changing,
    "repetition": Counting,
    "growth": Blind,
    "placement": Placed,
    "company": Social,
    "unwritten": Curious,
    "window": Narrow,
    "import": Spilling,
    "failure": Fragile,
    "beside": Torn,
}


def test_a_backend_that_keeps_the_rules_passes() -> None:
    """All of them apply to it."""
    subject = BackendSubject(GoodBackend)

    assert [outcome_of(check, subject) for check in BACKEND_CHECKS] == [("ok", [])] * len(BACKEND_CHECKS)


@pytest.mark.parametrize("name", BROKEN_BACKENDS)
def test_a_backend_that_breaks_a_rule_fails_its_check(name: str) -> None:
    """By the check that is meant."""
    (check,) = (check for check in BACKEND_CHECKS if check.name == name)

    with pytest.raises(CheckFailed):
        check.run(BackendSubject(BROKEN_BACKENDS[name]))


class Contagious(GoodBackend):
    """A lane that cannot be computed spoils what lies in the pages of those beside it."""

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """Spoil the first row of each lane but the first."""
        try:
            return super().step(batch)
        except EngineFailed:
            assert self.storage is not None
            for lane in batch[1:]:
                table = lane.tables[1]
                self.storage.rows(1, 0, 0)[table.row(table.extent.start)] = 1  # type: ignore[arg-type]
            raise


def test_a_step_that_harms_a_neighbour_fails_its_check() -> None:
    """Its own lane alone would not show it."""
    (check,) = (check for check in BACKEND_CHECKS if check.name == "failure")

    with pytest.raises(CheckFailed, match="lane 1"):
        check.run(BackendSubject(Contagious))


def test_every_check_has_a_backend_that_fails_it() -> None:
    """A check that nothing fails would be none."""
    assert {check.name for check in BACKEND_CHECKS} == set(BROKEN_BACKENDS)
