"""A backend without a model: checks the pattern of the engine `replay` on arrival, and counts up.

Theory of operation: every row is compared with what the pattern says of its layer and position, then copied
into pages as any KV is, unless there is no memory for them (`store=off`). A step reads nothing: the next
token is the number above the last one.

Ownership: as any backend; the importer writes beside steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.engine.decode import BackendDescription, KVPlace, LaneStep
from common.engine.identity import EngineIdentity
from common.engine.prefill import Logits
from common.engine.replay import PATTERN, Pattern, next_token, read_shape
from common.engine.setup import BackendSetup
from common.errors import EngineFailed
from common.kv.writer import Rows

ON_OFF = ("on", "off")


def make_backend(setup: BackendSetup) -> ReplayBackend:
    """Return the backend `replay`; options: those of the shape, check and store."""
    identity = read_shape(setup.options)
    checks = setup.options.choice("check", ON_OFF, "on") == "on"
    stores = setup.options.choice("store", ON_OFF, "on") == "on"
    setup.options.close()
    return ReplayBackend(identity, setup, checks=checks, stores=stores)


class ReplayBackend:
    """A `DecodeBackend` that computes nothing."""

    def __init__(self, identity: EngineIdentity, setup: BackendSetup, *, checks: bool, stores: bool) -> None:
        self._identity = identity
        self._checks = checks
        self._stores = stores
        self._groups = identity.geometry.groups
        self._patterns = [Pattern(group) for group in self._groups]
        self._pages: list[NDArray[np.uint8]] = []
        # Invariant: by group [layers, keys and values, rows, bytes of a row]; empty when nothing is stored.
        self._description = BackendDescription(
            "replay", (PATTERN,), setup.max_lanes, max_context_tokens=setup.max_prompt_tokens
        )

    def identity(self) -> EngineIdentity:
        """See `DecodeBackend`."""
        return self._identity

    def describe(self) -> BackendDescription:
        """See `DecodeBackend`."""
        return self._description

    def prefill_engine(self) -> None:
        """See `DecodeBackend`: it computes no prompts."""

    def allocate(self, page_tokens: int, num_pages: Sequence[int]) -> None:
        """See `DecodeBackend`."""
        if self._stores:
            # Written, so that every byte is there: a first touch during an import is several times slower.
            self._pages = [
                np.full((group.num_layers, 2, pages * page_tokens, group.row_bytes), 0, np.uint8)
                for group, pages in zip(self._groups, num_pages, strict=True)
            ]

    def write(self, place: KVPlace, group_layer: int, keys: Rows, values: Rows) -> None:
        """See `KVStore`.

        Raises: `EngineFailed` for a row that is not what the pattern says.
        """
        layer = self._groups[place.group_index].layer_indices[group_layer]
        for kind, rows in enumerate((keys, values)):
            found = rows.view(np.uint8).reshape(len(rows), -1)
            if self._checks:
                self._require_pattern(place, layer, kind, found)
            if self._stores:
                first = 0
                for run in place.table.runs(place.tokens):
                    pages = self._pages[place.group_index][group_layer, kind]
                    pages[run.start : run.stop] = found[first : first + len(run)]
                    first += len(run)

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """See `DecodeBackend`."""
        vocab_size = self._identity.geometry.vocab_size
        return np.stack([next_token([lane.token_id], vocab_size) for lane in batch])

    def _require_pattern(self, place: KVPlace, layer: int, kind: int, found: NDArray[np.uint8]) -> None:
        rows = self._patterns[place.group_index].rows(layer, kind, place.tokens)
        expected = rows.view(np.uint8).reshape(found.shape)
        if np.array_equal(found, expected):
            return
        wrong = int((found != expected).any(axis=1).argmax())
        what = ("keys", "values")[kind]
        raise EngineFailed(f"{what} of layer {layer}, position {place.tokens.start + wrong}: not the pattern")
