"""Engines that break one rule each: the check that is meant fails, and says what it saw."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.engine.prefill import EngineDescription, Logits, Wanted
from common.engine.setup import EngineSetup
from common.errors import Cancelled, EngineFailed, PromptTooLong
from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows
from kvspan.conformance import ENGINE_CHECKS, CheckFailed, EngineSubject
from kvspan.conformance.checks import outcome_of
from tests.support.factories import make_geometry
from tests.support.fakes import PatternEngine, one_hot

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


class Small(GoodEngine):
    """Has one layer, and takes every prompt in one chunk."""

    def __init__(self) -> None:
        PatternEngine.__init__(self, make_geometry(num_layers=1), LONGEST, LONGEST)
        self.writes_wanted_only = True


def test_an_engine_that_writes_once_passes_too() -> None:
    """Its first write is its last."""
    subject = EngineSubject(Small(), num_prompts=20)

    verdicts = {check.name: outcome_of(check, subject) for check in ENGINE_CHECKS}

    assert [name for name, (verdict, _) in verdicts.items() if verdict == "FAILS"] == []


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


def test_every_check_has_an_engine_that_fails_it() -> None:
    """A check that nothing fails would be none."""
    assert {check.name for check in ENGINE_CHECKS} == {*BROKEN_ENGINES, "reference"}
