"""Engines and backends that break one rule each: the check that is meant fails, and says what it saw."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.engine.decode import KVPlace, LaneStep
from common.engine.prefill import EngineDescription, Logits, Wanted
from common.engine.setup import EngineSetup
from common.errors import Cancelled, EngineFailed, PromptTooLong
from common.kv.geometry import KVGeometry
from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows
from kvspan.conformance import BACKEND_CHECKS, ENGINE_CHECKS, BackendSubject, CheckFailed, EngineSubject
from kvspan.conformance.checks import outcome_of
from tests.support.factories import make_geometry, make_hybrid_geometry
from tests.support.fakes import CountingBackend, PatternEngine, one_hot

GEOMETRY = make_geometry(num_layers=4)
CHUNK, LONGEST = 8, 20
WAIT_S = 20.0


class GoodEngine(PatternEngine):
    """Hands over what is wanted, and refuses what is too long."""

    def __init__(self) -> None:
        super().__init__(GEOMETRY, CHUNK, LONGEST)
        self.writes_wanted_only = True

    def prefill(
        self, token_ids: list[int], wanted: Wanted, writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> Logits:
        """See `PrefillEngine`."""
        if len(token_ids) > LONGEST:
            raise PromptTooLong("prompt tokens", len(token_ids), LONGEST)
        return super().prefill(token_ids, wanted, _NoEmpty(self.writer(writer)), self.asks(is_cancelled))

    def writer(self, writer: KVWriter) -> KVWriter:
        """Return what rows go through."""
        return writer

    def asks(self, is_cancelled: Callable[[], bool]) -> Callable[[], bool]:
        """Return what is asked whether to stop."""
        return is_cancelled


class _NoEmpty:
    def __init__(self, inner: KVWriter) -> None:
        self._inner = inner

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Leave out writes of no token."""
        if tokens:
            self._inner.write(layer_index, tokens, keys, values)


class _Altered:
    """A writer whose calls are altered."""

    def __init__(self, inner: KVWriter, alter: Callable[[KVWriter, int, Range, Rows, Rows], None]) -> None:
        self._inner = inner
        self._alter = alter

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Call it."""
        self._alter(self._inner, layer_index, tokens, keys, values)


class Moody(GoodEngine):
    """Describes itself otherwise each time."""

    def describe(self) -> EngineDescription:
        """Say something else."""
        self._number = getattr(self, "_number", 0) + 1
        return replace(super().describe(), max_prompt_tokens=LONGEST + self._number)


class Twice(GoodEngine):
    """Writes layer 2 twice."""

    def writer(self, writer: KVWriter) -> KVWriter:
        """Repeat."""

        def alter(inner: KVWriter, layer: int, *rest: Any) -> None:
            for _ in range(2 if layer == 2 else 1):
                inner.write(layer, *rest)

        return _Altered(writer, alter)


class Short(GoodEngine):
    """Leaves out half of each row."""

    def writer(self, writer: KVWriter) -> KVWriter:
        """Cut."""

        def alter(inner: KVWriter, layer: int, tokens: Range, keys: Rows, values: Rows) -> None:
            inner.write(layer, tokens, keys[..., : keys.shape[-1] // 2], values)

        return _Altered(writer, alter)


class Shifted(GoodEngine):
    """Gives a suffix the rows of the beginning."""

    def prefill(
        self, token_ids: list[int], wanted: Wanted, writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> Logits:
        """See `PrefillEngine`."""
        first = wanted[0].start
        self._salt = first if {tokens.start for tokens in wanted.values()} == {first} else 0
        return super().prefill(token_ids, wanted, writer, is_cancelled)

    def writer(self, writer: KVWriter) -> KVWriter:
        """Alter the bytes where something was skipped."""

        def alter(inner: KVWriter, layer: int, tokens: Range, keys: Rows, values: Rows) -> None:
            inner.write(layer, tokens, keys.view(np.uint8) ^ np.uint8(self._salt), values)

        return _Altered(writer, alter)


class Hasty(GoodEngine):
    """Drops the layers behind one of which nothing is wanted."""

    def prefill(
        self, token_ids: list[int], wanted: Wanted, writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> Logits:
        """See `PrefillEngine`."""
        some = len({tokens.start for tokens in wanted.values()}) > 1
        kept = {layer: Range(len(token_ids), len(token_ids)) for layer in wanted} if some else wanted
        return super().prefill(token_ids, kept, writer, is_cancelled)


class Greedy(GoodEngine):
    """Takes prompts that are too long, and cuts them."""

    def prefill(
        self, token_ids: list[int], wanted: Wanted, writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> Logits:
        """See `PrefillEngine`."""
        cut = token_ids[:LONGEST]
        fitting = {layer: tokens.intersection(Range(0, len(cut))) for layer, tokens in wanted.items()}
        return super().prefill(cut, fitting, writer, is_cancelled)


class Forgetful(GoodEngine):
    """Every prompt leaves something in the next one's numbers once one was cancelled."""

    def prefill(
        self, token_ids: list[int], wanted: Wanted, writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> Logits:
        """See `PrefillEngine`."""
        try:
            logits = super().prefill(token_ids, wanted, writer, is_cancelled)
        except Cancelled:
            self._was_cancelled = True
            raise
        return logits + np.float32(getattr(self, "_was_cancelled", False))


class Deaf(GoodEngine):
    """Never asks whether to stop."""

    def asks(self, is_cancelled: Callable[[], bool]) -> Callable[[], bool]:
        """Go on."""
        return lambda: False


class Wrapping(GoodEngine):
    """Makes an error of its own of what the writer raises."""

    def prefill(
        self, token_ids: list[int], wanted: Wanted, writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> Logits:
        """See `PrefillEngine`."""
        try:
            return super().prefill(token_ids, wanted, writer, is_cancelled)
        except (Cancelled, PromptTooLong):
            raise
        except Exception as error:
            raise EngineFailed("writer") from error


class Impatient(GoodEngine):
    """Gives up on a writer that takes its time, which here is one that is called on another thread."""

    def writer(self, writer: KVWriter) -> KVWriter:
        """Look where it is called."""

        def alter(inner: KVWriter, *call: Any) -> None:
            inner.write(*call)
            if threading.current_thread().name == "conformance":
                raise EngineFailed("the writer took its time")

        return _Altered(writer, alter)


class Reusing(GoodEngine):
    """Hands over one buffer again and again."""

    def writer(self, writer: KVWriter) -> KVWriter:
        """Copy into the buffer."""
        buffer = np.zeros((2, CHUNK, 3, 64), np.uint8)

        def alter(inner: KVWriter, layer: int, tokens: Range, keys: Rows, values: Rows) -> None:
            shown = buffer[:, : len(tokens), :, : keys.shape[-1]]
            shown[0], shown[1] = keys, values
            inner.write(layer, tokens, shown[0], shown[1])

        return _Altered(writer, alter)


class Hoarding(GoodEngine):
    """Keeps something of every prompt."""

    def writer(self, writer: KVWriter) -> KVWriter:
        """Keep a megabyte."""
        self._kept = [*getattr(self, "_kept", ()), np.ones(1 << 20, np.uint8)]
        return writer


def make_deaf(setup: EngineSetup) -> Deaf:
    """Return an engine that never asks whether to stop."""
    setup.options.close()
    return Deaf()


BROKEN_ENGINES = {
    "description": Moody,
    "delivery": Twice,
    "rows": Short,
    "suffix": Shifted,
    "wanted": Hasty,
    "longest": Greedy,
    "repetition": Forgetful,
    "cancel": Deaf,
    "writer": Wrapping,
    "waiting": Impatient,
    "immutability": Reusing,
    "memory": Hoarding,
}


class WrongReference:
    """Another checkpoint."""

    def prefill(self, token_ids: list[int]) -> tuple[dict[int, Any], Logits]:
        """See `Reference`."""
        rows = {
            layer.layer_index: np.ones((2, len(token_ids), 3, 8), np.float32) for layer in GEOMETRY.layers
        }
        return rows, one_hot(GEOMETRY.vocab_size, 0)


def test_an_engine_that_keeps_the_rules_passes() -> None:
    """Else what follows would show nothing."""
    subject = EngineSubject(GoodEngine())

    verdicts = {check.name: outcome_of(check, subject) for check in ENGINE_CHECKS}

    assert {name: verdict for name, verdict in verdicts.items() if verdict[0] != "ok"} == {
        "reference": ("skip", ["there is no reference of this checkpoint"])
    }


@pytest.mark.parametrize("name", BROKEN_ENGINES)
def test_an_engine_that_breaks_a_rule_fails_its_check(name: str) -> None:
    """By the check that is meant, with what was seen."""
    check = next(check for check in ENGINE_CHECKS if check.name == name)
    subject = EngineSubject(BROKEN_ENGINES[name]())

    with pytest.raises(CheckFailed) as failed:
        check.run(subject)

    assert str(failed.value)


def test_another_checkpoint_fails_the_check_of_the_reference() -> None:
    """With the layer, and how far it is off."""
    (check,) = (check for check in ENGINE_CHECKS if check.name == "reference")

    with pytest.raises(CheckFailed, match="layer 0 differs by"):
        check.run(EngineSubject(GoodEngine(), WrongReference()))


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


def test_every_check_has_something_that_fails_it() -> None:
    """A check that nothing fails would be none."""
    assert {check.name for check in ENGINE_CHECKS} == {*BROKEN_ENGINES, "reference"}
    assert {check.name for check in BACKEND_CHECKS} == set(BROKEN_BACKENDS)
