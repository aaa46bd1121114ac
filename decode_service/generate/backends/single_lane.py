"""Decode with one sequence in one contiguous cache, as on accelerators that let nobody write what they read.

Theory of operation: the forward is that of `torch_backend.py`; only where rows lie differs. Tables say which
positions the sequence has, and nothing of where they are: a position lies at its distance from the first of
the table, keys before values. A windowed group drops pages from the front as it goes on, and what is left
moves there:

    table        |p4 : 16 .. 19|p5 : 20 .. 23|          table   |p5 : 20 .. 23|p6 : 24 .. 27|
    rows         |0 ......... 3|4 ......... 7|   -->    rows    |0 ......... 3|4 ......... 7|

Ownership: as `TorchBackend`. There is one lane, and admission gives its pages and the lane together: so
nothing is written while another sequence is read, and the next one begins with its first write.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from common.engine.decode import BackendDescription, KVPlace, LaneStep
from common.engine.prefill import PrefillEngine
from common.engine.setup import BackendSetup
from common.errors import ConfigError
from common.kv.geometry import GroupGeometry
from common.kv.ranges import Range
from common.kv.tables import PageTable
from common.kv.writer import Rows
from common.model.loader import LoadedModel
from common.model.prepare import prepare
from decode_service.cache.storage import Kind
from decode_service.generate.backends.torch_backend import StepPlan, TorchBackend


def make_backend(setup: BackendSetup) -> SingleLaneBackend:
    """Return the backend `single-lane`; it has no options.

    Raises: `ConfigError` before anything is loaded when more than one lane is wanted.
    """
    setup.options.close()
    if setup.max_lanes > 1:
        raise ConfigError("lanes", setup.max_lanes, "--backend=single-lane has one: give --lanes=1")
    ready = prepare(setup)
    return SingleLaneBackend(ready.loaded.model, ready.engine, ready.loaded)


class SingleLaneBackend(TorchBackend):
    """A `DecodeBackend` of one lane."""

    def __init__(
        self, model: PreTrainedModel, engine: PrefillEngine, text: LoadedModel | None = None
    ) -> None:
        """See `TorchBackend`."""
        super().__init__(model, engine, 1, text)
        told = engine.describe()
        self._one = BackendDescription(
            "single-lane", told.numerics, 1, kernels=told.kernels, writes_while_stepping=False
        )
        self._bases: dict[int, int] = {}
        # Invariant: by group the position that lies in row 0; nothing before the first write.

    def describe(self) -> BackendDescription:
        """See `DecodeBackend`."""
        return self._one

    def write(self, place: KVPlace, group_layer: int, keys: Rows, values: Rows) -> None:
        """See `KVStore`."""
        base = self._bases[place.group_index] = place.table.extent.start
        rows = slice(place.tokens.start - base, place.tokens.stop - base)
        for kind, taken in ((Kind.KEYS, keys), (Kind.VALUES, values)):
            stored = self.storage.rows(place.group_index, group_layer, kind)
            _require_room(stored, place.table)
            stored.view(taken.dtype).reshape(len(stored), *taken.shape[1:])[rows] = taken

    def plan(self, group: GroupGeometry, batch: Sequence[LaneStep]) -> StepPlan:
        """See `TorchBackend`."""
        (lane,) = batch
        table = lane.tables[group.group_index]
        self._move_to_front(group, table, lane.position)
        base = table.extent.start
        visible = Range(group.visible(lane.position).start, lane.position + 1)
        return StepPlan([lane.position - base], [((visible.start - base, len(visible)),)])

    def _move_to_front(self, group: GroupGeometry, table: PageTable, position: int) -> None:
        """Let the first position of the table lie in row 0; what is behind it moves along."""
        base = table.extent.start
        # A prompt of which nothing is wanted here has written nothing: its first row comes with the step.
        passed = base - self._bases.get(group.group_index, base)
        self._bases[group.group_index] = base
        if passed <= 0:
            return
        kept = position - base
        for layer in range(group.num_layers):
            for rows_RHD in self.storage.key_value(group.group_index, layer):
                # Of tensors whose memory overlaps torch promises nothing.
                rows_RHD[:kept] = rows_RHD[passed : passed + kept].clone()


def _require_room(stored: NDArray[np.uint8], table: PageTable) -> None:
    if len(table.extent) > len(stored):
        raise ValueError(f"a table of {len(table.extent)} positions, room for {len(stored)}")
