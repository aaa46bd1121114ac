"""An engine under test, and what is asked of it and looked at again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription, Logits, PrefillEngine, Wanted
from common.kv.ranges import Range
from common.kv.writer import Rows

GENERATOR_SEED = 11


class Reference(Protocol):
    """The same checkpoint, computed by somebody else in float32."""

    def prefill(self, token_ids: list[int]) -> tuple[dict[int, NDArray[np.float32]], Logits]:
        """Return keys and values [2, tokens kept, KV heads, head size] by layer, and the last logits.

        Of a windowed layer the last positions only may be kept.
        """


@dataclass(frozen=True, slots=True)
class Written:
    """One call of the writer: copies of what came."""

    layer_index: int
    tokens: Range
    keys: bytes
    values: bytes


@dataclass(slots=True)
class Recorder:
    """A `KVWriter` that keeps what it gets, and the arrays themselves, to look at them again."""

    writes: list[Written] = field(default_factory=list)
    arrays: list[tuple[Rows, Rows]] = field(default_factory=list)
    on_write: Callable[[int], None] = lambda number: None
    """Called with the number of each write before it is taken, from 0."""

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Keep a copy."""
        self.on_write(len(self.writes))
        self.writes.append(Written(layer_index, tokens, keys.tobytes(), values.tobytes()))
        self.arrays.append((keys, values))

    def rows(self, layer_index: int, tokens: Range) -> tuple[bytes, bytes]:
        """Return keys and values of a layer for some positions, cut out of what was written."""
        parts: list[tuple[bytes, bytes]] = []
        for one in self.writes:
            wanted = one.tokens.intersection(tokens)
            if one.layer_index == layer_index and wanted:
                size = len(one.keys) // len(one.tokens)
                part = slice(
                    (wanted.start - one.tokens.start) * size, (wanted.stop - one.tokens.start) * size
                )
                parts.append((one.keys[part], one.values[part]))
        return b"".join(keys for keys, _ in parts), b"".join(values for _, values in parts)


@dataclass(slots=True)
class Outcome:
    """What a prompt gave."""

    written: Recorder
    logits: bytes


@dataclass
class EngineSubject:
    """An engine that is used by one check after the other, as a service would."""

    engine: PrefillEngine
    reference: Reference | None = None
    """None when there is nothing to compare with; those checks are skipped."""

    num_prompts: int = 200
    """Of the check that looks at memory."""

    @cached_property
    def identity(self) -> EngineIdentity:
        """What the engine says of its checkpoint."""
        return self.engine.identity()

    @cached_property
    def description(self) -> EngineDescription:
        """What it says of itself."""
        return self.engine.describe()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths at which something may change: edges of widths and chunks, the shortest, the longest."""
        told = self.description
        edges = {*told.widths, *((told.chunk_tokens,) if told.chunk_tokens else ())}
        around = {length + step for length in edges for step in (-1, 0, 1)}
        limit = told.max_prompt_tokens
        return tuple(sorted(one for one in {1, 2, 7, *around, min(limit, 300)} if 1 <= one <= limit))

    def prompt(self, length: int, seed: int = GENERATOR_SEED) -> list[int]:
        """Return a prompt that is the same each time."""
        generator = np.random.default_rng(seed)
        most = min(self.identity.geometry.vocab_size, 256)
        return [int(token) for token in generator.integers(0, most, length)]

    def wanted(self, length: int, first_token: int = 0) -> dict[int, Range]:
        """Return every position from the first on, of every layer."""
        layers = self.identity.geometry.layers
        return {layer.layer_index: Range(first_token, length) for layer in layers}

    def run(
        self,
        prompt: list[int],
        wanted: Wanted | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Compute a prompt."""
        writer = Recorder()
        wanted = self.wanted(len(prompt)) if wanted is None else wanted
        logits = self.engine.prefill(list(prompt), wanted, writer, is_cancelled)
        return Outcome(writer, np.ascontiguousarray(logits, dtype=np.float32).tobytes())
