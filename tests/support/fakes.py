"""An engine and a backend without a model: KV that is a function of its place, and tokens that count up.

Theory of operation: every row of every layer has bytes of its own, so that a byte in the wrong place never
passes. A test steers both by hooks that they call on their own thread; nothing here waits for time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.engine.decode import BackendDescription, KVPlace, LaneStep
from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription, Logits, Wanted, wanted_of
from common.errors import Cancelled
from common.kv.geometry import GroupGeometry, KVGeometry
from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows
from common.session.identity import ModelFingerprint
from common.telemetry.journal import Event
from decode_service.cache.spec import CacheGeometry
from decode_service.cache.storage import Kind, PagedStorage


def pattern(group: GroupGeometry, layer_index: int, kind: Kind, tokens: Range, seed: int = 0) -> Rows:
    """Return the keys or values of one model layer: bytes [T, H, row_bytes / H], different in every row."""
    rows = b"".join(
        hashlib.shake_128(f"{seed}/{layer_index}/{kind.value}/{position}".encode()).digest(group.row_bytes)
        for position in tokens
    )
    shape = (len(tokens), group.num_kv_heads, group.row_bytes // group.num_kv_heads)
    return np.frombuffer(rows, dtype=np.uint8).reshape(shape)


def make_engine_identity(geometry: KVGeometry) -> EngineIdentity:
    """Return the checkpoint of something without weights."""
    return EngineIdentity("pattern", ModelFingerprint("c0", "a1", "d2", "b7"), (), (), geometry)


def all_wanted(geometry: KVGeometry, prompt_len: int, first_token: int = 0) -> dict[int, Range]:
    """Return what decode wants of each layer of a prompt."""
    return wanted_of(geometry, geometry.required(first_token, prompt_len))


class PatternEngine:
    """A `PrefillEngine` whose KV is `pattern` and whose seed is the sum of the prompt."""

    def __init__(self, geometry: KVGeometry, chunk_tokens: int = 8, max_prompt_tokens: int = 64) -> None:
        self._identity = make_engine_identity(geometry)
        self._chunk_tokens = chunk_tokens
        self._description = EngineDescription(
            "pattern", ("bytes of shake-128",), max_prompt_tokens, chunk_tokens
        )
        self.on_layer: Callable[[Range, int], None] = lambda chunk, layer_index: None
        """Called on the engine's thread before each layer of each chunk."""

        self.writes_wanted_only = False
        """Whether it cuts what it computed to what is wanted, instead of handing over whole chunks."""

        self.skipped: set[int] = set()
        """Model layers that it leaves out: a fault."""

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt."""
        return self._description.max_prompt_tokens

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
        geometry, step = self._identity.geometry, self._chunk_tokens
        first_token = min((tokens.start for tokens in wanted.values() if tokens), default=len(token_ids))
        for start in range(first_token // step * step, len(token_ids), step):
            chunk = Range(start, min(start + step, len(token_ids)))
            for layer, (group, _) in geometry.by_layer.items():
                if is_cancelled():
                    raise Cancelled("told to stop")
                self.on_layer(chunk, layer)
                told = chunk.intersection(wanted[layer]) if self.writes_wanted_only else chunk
                if layer not in self.skipped:
                    rows = [pattern(group, layer, kind, told, sum(token_ids)) for kind in Kind]
                    writer.write(layer, told, *rows)
        return one_hot(geometry.vocab_size, (token_ids[-1] + 1) % geometry.vocab_size)


def one_hot(vocab_size: int, token_id: int) -> NDArray[np.float32]:
    """Return logits that leave no doubt."""
    logits = np.zeros(vocab_size, dtype=np.float32)
    logits[token_id] = 20
    return logits


class CountingBackend:
    """A `DecodeBackend` that follows each token with the next number."""

    def __init__(self, geometry: KVGeometry, max_lanes: int = 5) -> None:
        self._identity = make_engine_identity(geometry)
        self._description = BackendDescription("counting", ("counts",), max_lanes)
        self.storage: PagedStorage | None = None
        """Made by `allocate`."""

        self.batches: list[tuple[LaneStep, ...]] = []
        """Every step's lanes, those of a step that failed included."""

        self.on_step: Callable[[int], None] = lambda number: None
        """Called on the step loop's thread at the start of each step with its number, from 0."""

        self.poisoned: set[int] = set()
        """Tokens after which the logits are no numbers: a fault of one lane."""

    def identity(self) -> EngineIdentity:
        """See `DecodeBackend`."""
        return self._identity

    def prefill_engine(self) -> None:
        """See `DecodeBackend`: it computes no prompts."""

    def allocate(self, page_tokens: int, num_pages: Sequence[int]) -> None:
        """See `DecodeBackend`."""
        self.storage = PagedStorage(CacheGeometry.of(self._identity.geometry, page_tokens), num_pages)

    def write(self, place: KVPlace, group_layer: int, keys: Rows, values: Rows) -> None:
        """See `KVStore`."""
        assert self.storage is not None
        self.storage.write(place, group_layer, keys, values)

    def describe(self) -> BackendDescription:
        """See `DecodeBackend`."""
        return self._description

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """See `DecodeBackend`."""
        self.batches.append(tuple(batch))
        self.on_step(len(self.batches) - 1)
        vocab_size = self._identity.geometry.vocab_size
        rows = [
            np.full(vocab_size, np.nan, dtype=np.float32)
            if lane.token_id in self.poisoned
            else one_hot(vocab_size, (lane.token_id + 1) % vocab_size)
            for lane in batch
        ]
        return np.stack(rows)


class Lines:
    """A journal that keeps its lines."""

    def __init__(self) -> None:
        self.kept: list[tuple[Event, dict[str, Any]]] = []

    def record(self, event: Event, fields: Mapping[str, Any]) -> None:
        """See `Recorder`."""
        self.kept.append((event, dict(fields)))

    def close(self) -> None:
        """See `Recorder`."""

    def statistics(self) -> None:
        """See `Recorder`."""

    @property
    def events(self) -> list[Event]:
        """What was recorded."""
        return [event for event, _ in self.kept]
