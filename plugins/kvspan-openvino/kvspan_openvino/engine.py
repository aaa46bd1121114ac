"""The engine: a prompt is padded to the smallest compiled width, and leaves part by part.

Theory of operation: a pass runs the parts of one width one after the other. As soon as a part has ended the
next one is started, and while it computes the keys and values of the layers of the first are handed over:

    part 0  | computes |
    part 1             | computes |
    part 2                        | computes |
    handed over        | 0        | 1        | 2 and the logits

Padding stands behind the prompt, where no row of the prompt sees it: attention is causal in every layer, and
everything else is row by row. What the padded rows hold is never handed over.

Ownership: used by one thread. The requests own the arrays that are handed over; the next prompt of the same
width writes them again, and none begins before the writer of the last one is gone.

Not here: what runs a part (`runtime.py`).

Shapes: T tokens of a width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription, Logits, Wanted
from common.errors import Cancelled, PromptTooLong
from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows
from kvspan_openvino.runtime import CompiledPart, Device


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Keys and values of one layer, as long as its request is not run again."""

    layer_index: int
    keys: Rows
    values: Rows


class Pass:
    """All parts of a model at one width, each fed by the one before."""

    def __init__(self, width: int, parts: Sequence[CompiledPart], layers: Sequence[Range]) -> None:
        self.width = width
        self._parts = tuple(parts)
        self._layers = tuple(layers)
        self._ids_1T = np.zeros((1, width), dtype=np.int64)
        self._last_1 = np.zeros(1, dtype=np.int64)
        self._parts[0].feed(0, self._ids_1T)
        for before, part in zip(self._parts, self._parts[1:], strict=False):
            part.feed_from(before)
        self._parts[-1].feed(1, self._last_1)

    def run(
        self,
        token_ids: Sequence[int],
        take: Callable[[LayerRows], object],
        ask: Callable[[], object] = lambda: None,
        padding: int = 0,
    ) -> Logits:
        """Compute a prompt of at most `width` tokens; `take` is called for each layer in order.

        It is called while the next part computes, and may raise: the run of that part is waited for first.
        `ask` may raise too; it is called before each part, when none runs.
        """
        ask()
        self._ids_1T[0, : len(token_ids)] = token_ids
        self._ids_1T[0, len(token_ids) :] = padding
        self._last_1[0] = len(token_ids) - 1
        self._parts[0].start()
        for index, part in enumerate(self._parts):
            part.wait()
            ask()
            following = self._parts[index + 1 : index + 2]
            for one in following:
                one.start()
            try:
                for rows in self._rows(index):
                    take(rows)
            except BaseException:
                for one in following:
                    one.wait()
                raise
        logits: Logits = self._parts[-1].outputs[-1].copy()
        return logits

    def part_times(self) -> list[float]:
        """Return the seconds of each part, run by itself."""
        return [_timed(part) for part in self._parts]

    def _rows(self, index: int) -> list[LayerRows]:
        outputs = self._parts[index].outputs
        layers = self._layers[index]
        return [
            LayerRows(layer, outputs[2 * place], outputs[2 * place + 1])
            for place, layer in enumerate(range(layers.start, layers.stop))
        ]


class OpenVinoEngine:
    """A `PrefillEngine` over the passes of every width."""

    def __init__(
        self, passes: Sequence[Pass], identity: EngineIdentity, description: EngineDescription
    ) -> None:
        """Take passes of ascending width."""
        self._passes = tuple(passes)
        self._identity = identity
        self._description = description

    def identity(self) -> EngineIdentity:
        """See `PrefillEngine`."""
        return self._identity

    def describe(self) -> EngineDescription:
        """See `PrefillEngine`."""
        return self._description

    def prefill(
        self,
        token_ids: list[int],
        wanted: Wanted,
        writer: KVWriter,
        is_cancelled: Callable[[], bool],
    ) -> Logits:
        """See `PrefillEngine`."""
        self._check(token_ids, wanted)
        one = next(one for one in self._passes if one.width >= len(token_ids))

        def ask() -> None:
            if is_cancelled():
                raise Cancelled("prefill was cancelled")

        def take(rows: LayerRows) -> None:
            ask()
            if tokens := wanted.get(rows.layer_index):
                part = slice(tokens.start, tokens.stop)
                writer.write(rows.layer_index, tokens, rows.keys[part], rows.values[part])

        return one.run(token_ids, take, ask)

    def _check(self, token_ids: list[int], wanted: Wanted) -> None:
        too_far = [tokens for tokens in wanted.values() if tokens.stop > len(token_ids)]
        if too_far or not token_ids:
            raise ValueError(f"cannot export {too_far} of {len(token_ids)} tokens")
        if len(token_ids) > self._description.max_prompt_tokens:
            raise PromptTooLong("max_prompt_tokens", len(token_ids), self._description.max_prompt_tokens)


def compile_pass(
    device: Device, models: Sequence[Any], layers: Sequence[Range], width: int, hidden_size: int
) -> Pass:
    """Return the pass of one width."""
    shapes = [(1, width), *[(1, width, hidden_size)] * (len(models) - 1)]
    compiled = [device.compile(model, shape) for model, shape in zip(models, shapes, strict=True)]
    return Pass(width, compiled, layers)


def rows_of(one: Pass, token_ids: Sequence[int], padding: int = 0) -> tuple[list[NDArray[Any]], Logits]:
    """Return copies of keys and values of every layer for the tokens of a prompt, and its last logits."""
    kept: list[NDArray[Any]] = []

    def take(rows: LayerRows) -> None:
        kept.extend(values[: len(token_ids)].copy() for values in (rows.keys, rows.values))

    logits = one.run(token_ids, take, padding=padding)
    return kept, logits


def _timed(part: CompiledPart) -> float:
    began = time.perf_counter()
    part.start()
    part.wait()
    return time.perf_counter() - began
