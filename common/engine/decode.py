"""What the decode service needs from whatever computes a decode step.

Theory of operation: a backend owns the memory of the cache, for a device may not let anybody else write it.
The service decides where a sequence lies (pages and tables) and when somebody may write; a backend follows
tables, and knows nothing of requests, reservations or sampling.

Not here: which page belongs to whom (`decode_service/cache`), who is in the batch
(`decode_service/generate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.engine.identity import EngineIdentity
from common.engine.prefill import Logits, PrefillEngine
from common.kv.ranges import Range
from common.kv.tables import PageTable
from common.kv.writer import Rows


@dataclass(frozen=True, slots=True)
class LaneStep:
    """One lane's part of a step: a token and where its sequence lies."""

    token_id: int

    position: int
    """Absolute position of the token; its KV is written there by the step."""

    tables: tuple[PageTable, ...]
    """One per group; covers what the token sees, and its own position."""


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where some tokens of one sequence lie in one group."""

    group_index: int
    table: PageTable
    tokens: Range
    """Absolute positions within the extent of the table."""


@dataclass(frozen=True, slots=True)
class BackendDescription:
    """What a backend can do, fixed for its life."""

    name: str
    numerics: tuple[str, ...]
    """What decides the bits of the logits."""

    max_lanes: int

    max_context_tokens: int = 0
    """Longest prompt with its answer; 0 for what the config of the model says."""

    kernels: str = ""
    """Which kernels it uses and what they promise, for people."""

    writes_while_stepping: bool = True
    """Whether `write` may run beside `step`; where it may not, imports wait until no lane is active."""


class KVStore(Protocol):
    """Takes finished KV into the cache."""

    def write(self, place: KVPlace, group_layer: int, keys: Rows, values: Rows) -> None:
        """Copy the rows of one layer, in order of their tokens; complete when it returns.

        Rows have the geometry's bytes, of any item size. Called on one thread at a time. Pages that the table
        does not name are not touched.
        """


class DecodeBackend(KVStore, Protocol):
    """Computes steps, on one thread at a time."""

    def identity(self) -> EngineIdentity:
        """Return the checkpoint it computes with, and the KV that it stores."""

    def describe(self) -> BackendDescription:
        """Return what it can do."""

    def prefill_engine(self) -> PrefillEngine | None:
        """Return what computes prompts in this process with the same weights; None when nothing does.

        It is called from one thread, which may be another one than that of `step`, and beside it.
        """

    def allocate(self, page_tokens: int, num_pages: Sequence[int]) -> None:
        """Make room for so many pages of each group, and touch all of it; called once, before all else.

        Raises: `ConfigError` when it has no room for them.
        """

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """Write the KV of every token into its pages and return the logits [lanes, vocab].

        A row is a function of its own sequence: not of its neighbours, its place in the batch, or where its
        pages lie. Raises `EngineError` when it cannot; the KV of the step's tokens is undefined then, and
        nothing else has changed.
        """
