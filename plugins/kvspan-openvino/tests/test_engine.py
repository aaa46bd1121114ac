"""Tests of kvspan_openvino/engine.py: the order of a pass, and what the engine of a tiny model computes.

The tolerance against transformers is that of the conversion: see `tolerance` in `kvspan_openvino/convert.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kvspan_openvino.convert import tolerance
from kvspan_openvino.engine import LayerRows, OpenVinoEngine, Pass, rows_of
from numpy.typing import NDArray

from common.engine.prefill import Logits, Wanted
from common.errors import Cancelled, EngineFailed, PromptTooLong
from common.kv.ranges import Range
from common.model.loader import load_model

FAMILIES = ("tiny:llama", "tiny:qwen3", "tiny:gemma3")
EngineOf = Callable[[str], OpenVinoEngine]


class Taken:
    """A writer that keeps copies of what it is given."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.turns: list[tuple[int, Range]] = []
        self.rows: list[NDArray[Any]] = []
        self.given: list[NDArray[Any]] = []
        self._limit = limit

    def write(self, layer_index: int, tokens: Range, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Keep it; raise for one too many."""
        if len(self.turns) == self._limit:
            raise RuntimeError("no room")
        self.turns.append((layer_index, tokens))
        self.rows += [keys.copy(), values.copy()]
        self.given += [keys, values]


class FakePart:
    """Tells when it is started and waited for."""

    def __init__(self, name: str, told: list[str], num_outputs: int) -> None:
        self._name = name
        self._told = told
        self.outputs = [np.full((4, 1, 2), index, np.float32) for index in range(num_outputs)]

    def feed(self, _index: int, _values: NDArray[Any]) -> None:
        """Take an input."""

    def feed_from(self, _other: Any) -> None:
        """Take an input."""

    def start(self) -> None:
        """Tell it."""
        self._told.append(f"start {self._name}")

    def wait(self) -> None:
        """Tell it."""
        self._told.append(f"end {self._name}")


def make_pass(told: list[str]) -> Pass:
    """Return a pass over two parts of one layer each."""
    parts: list[Any] = [FakePart("a", told, 3), FakePart("b", told, 3)]
    return Pass(4, parts, [Range(0, 1), Range(1, 2)])


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 256, length).tolist()
    return ids


def all_of(engine: OpenVinoEngine, length: int) -> Wanted:
    """Return that everything is wanted."""
    return {layer.layer_index: Range(0, length) for layer in engine.identity().geometry.layers}


def run(engine: OpenVinoEngine, ids: list[int], wanted: Wanted | None = None) -> tuple[Taken, Logits]:
    """Return what a prompt leaves behind."""
    taken = Taken()
    return taken, engine.prefill(
        ids, all_of(engine, len(ids)) if wanted is None else wanted, taken, lambda: False
    )


def bits(rows: list[NDArray[Any]], logits: Logits) -> list[bytes]:
    """Return what can be compared bit for bit."""
    return [values.tobytes() for values in (*rows, logits)]


def test_a_part_leaves_while_the_next_one_computes() -> None:
    """The next part is started before the rows of the one that ended are handed over."""
    told: list[str] = []

    make_pass(told).run([1, 2], lambda rows: told.append(f"layer {rows.layer_index}"))

    assert told == ["start a", "end a", "start b", "layer 0", "end b", "layer 1"]


def test_a_writer_that_raises_is_heard_when_nothing_computes() -> None:
    """A request that still ran would write into the next prompt."""
    told: list[str] = []

    def fail(rows: LayerRows) -> None:
        told.append(f"layer {rows.layer_index}")
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        make_pass(told).run([1, 2], fail)

    assert told == ["start a", "end a", "start b", "layer 0", "end b"]


def test_who_gives_up_is_heard_before_the_next_part() -> None:
    """No part is started for a prompt that nobody waits for."""
    told: list[str] = []

    def ask() -> None:
        if told:
            raise Cancelled("gone")

    with pytest.raises(Cancelled):
        make_pass(told).run([1, 2], lambda _: told.append("layer"), ask)

    assert told == ["start a", "end a"]


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64])
def test_kv_and_logits_are_those_of_transformers(engine_of: EngineOf, model: str, length: int) -> None:
    """Every position of every layer, within rounding, and the same next token; one pass of either width."""
    loaded = load_model(model, "float32", False)
    ids = prompt(length)
    with torch.inference_mode():
        output = loaded.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)

    taken, logits = run(engine_of(model), ids)

    theirs = [
        rows[0].transpose(0, 1).numpy() for one in output.cache.layers for rows in (one.keys, one.values)
    ]
    assert [layer for layer, _ in taken.turns] == list(range(len(theirs) // 2))
    for found, expected in zip(taken.rows, theirs, strict=True):
        # A windowed layer of transformers keeps the end only.
        np.testing.assert_allclose(
            found[-len(expected) :], expected, rtol=0, atol=tolerance(loaded, float(np.abs(expected).max()))
        )
    expected = output.logits[0, -1].numpy()
    np.testing.assert_allclose(
        logits, expected, rtol=0, atol=tolerance(loaded, float(np.abs(expected).max()))
    )
    assert int(logits.argmax()) == int(expected.argmax())


@pytest.mark.parametrize("model", FAMILIES)
def test_padding_reaches_no_row_of_the_prompt(engine_of: EngineOf, model: str) -> None:
    """Whatever stands behind a prompt, its rows and logits have the same bits."""
    one = engine_of(model)._passes[0]

    first, second = (rows_of(one, prompt(9), padding) for padding in (0, 200))

    assert bits(*first) == bits(*second)


def test_bits_do_not_depend_on_the_width(engine_of: EngineOf) -> None:
    """A prompt that fits both widths, computed at either; this is what `kernels` says of them."""
    engine = engine_of("tiny:llama")

    narrow, wide = (rows_of(one, prompt(20)) for one in engine._passes)

    assert (bits(*narrow) == bits(*wide)) == (engine.describe().kernels == "rows are alike at every width")


def test_a_prompt_has_the_same_bits_each_time(engine_of: EngineOf) -> None:
    """After other prompts, after one that was given up and after one whose writer failed."""
    engine = engine_of("tiny:qwen3")
    first, logits = run(engine, prompt(17))
    run(engine, prompt(30, seed=1))
    with pytest.raises(Cancelled):
        engine.prefill(prompt(12, seed=2), all_of(engine, 12), Taken(), lambda: True)
    with pytest.raises(RuntimeError, match="no room"):
        engine.prefill(prompt(12, seed=2), all_of(engine, 12), Taken(limit=1), lambda: False)

    again, same = run(engine, prompt(17))

    assert [rows.tobytes() for rows in first.rows] == [rows.tobytes() for rows in again.rows]
    assert logits.tobytes() == same.tobytes()


def test_what_was_handed_over_stays_as_it_is(engine_of: EngineOf) -> None:
    """Until the prompt has ended, however many parts follow."""
    taken, _ = run(engine_of("tiny:llama"), prompt(40))

    assert all(np.array_equal(then, now) for then, now in zip(taken.rows, taken.given, strict=True))


def test_only_what_is_wanted_is_handed_over(engine_of: EngineOf) -> None:
    """A suffix of one layer and nothing of others, as with windows; the same bits as in full."""
    engine = engine_of("tiny:llama")
    everything, logits = run(engine, prompt(20))

    taken, same = run(engine, prompt(20), {0: Range(13, 20), 1: Range(20, 20), 4: Range(0, 20)})

    assert taken.turns == [(0, Range(13, 20)), (4, Range(0, 20))]
    expected = [everything.rows[0][13:], everything.rows[1][13:], everything.rows[8], everything.rows[9]]
    assert [rows.tobytes() for rows in taken.rows] == [rows.tobytes() for rows in expected]
    assert logits.tobytes() == same.tobytes()


def test_a_prompt_above_the_largest_width_is_refused_with_both_numbers(engine_of: EngineOf) -> None:
    """It is never cut."""
    with pytest.raises(PromptTooLong, match=r"needs 65 of max_prompt_tokens, the limit is 64"):
        run(engine_of("tiny:llama"), prompt(65))


def test_what_openvino_raises_is_a_failure_of_the_engine(engine_of: EngineOf) -> None:
    """It is told as one, and the next prompt is as before."""
    engine = engine_of("tiny:llama")
    before, _ = run(engine, prompt(8))
    failing = engine._passes[0]._parts[0]
    original = failing._request

    class Broken:
        def start_async(self) -> None:
            raise RuntimeError("device lost")

    failing._request = Broken()
    try:
        with pytest.raises(EngineFailed, match="OpenVINO: RuntimeError"):
            run(engine, prompt(8))
    finally:
        failing._request = original

    after, _ = run(engine, prompt(8))
    assert [rows.tobytes() for rows in before.rows] == [rows.tobytes() for rows in after.rows]
