"""Decode with transformers' own modules over pages: many lanes, continuous batching.

Theory of operation: a step is one forward over [lanes, 1] tokens. Embedding, norms and linears see all lanes
as rows; linears must have been made independent of the number of rows (`common/model/forward/linears.py`). In
every KV-owning layer the cache writes each token's rows into its page and hands the model an `AttendedKV`;
each sequence then attends on its own over the runs of its pages. One run is a view; several are joined in one
copy with the same strides, so that the bits do not tell how the pages lie.

What is the same in every layer of a group, rows and runs, is worked out once per step.

Ownership: used from the step loop's thread only. While a step runs, pages of other sequences may be written.

Shapes: B lanes, R rows of a group's storage, L attended tokens, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.engine.decode import BackendDescription, KVPlace, LaneStep
from common.engine.identity import EngineIdentity
from common.engine.prefill import Logits, PrefillEngine
from common.engine.setup import BackendSetup
from common.errors import EngineFailed, told
from common.kv.geometry import GroupGeometry
from common.kv.ranges import Range
from common.kv.tables import PageTable
from common.kv.writer import Rows
from common.model.forward import attention
from common.model.forward.linears import STABLE_ROWS
from common.model.loader import LoadedModel
from common.model.prepare import prepare
from decode_service.cache.spec import CacheGeometry
from decode_service.cache.storage import PagedStorage

Runs = tuple[tuple[int, int], ...]
"""(first row, number of rows) of one sequence, in order of its positions."""


class TorchBackend:
    """A `DecodeBackend` for any transformers model that `install` accepts."""

    def __init__(
        self,
        model: PreTrainedModel,
        engine: PrefillEngine,
        max_lanes: int,
        text: LoadedModel | None = None,
    ) -> None:
        """Compute with a model whose prompts `engine` computes; `text` is what was read of its folder."""
        attention.install(model)
        self._model = model
        self._engine = engine
        self._text = text
        self._identity, told = engine.identity(), engine.describe()
        self._description = BackendDescription("torch", told.numerics, max_lanes, kernels=told.kernels)
        self._groups = self._identity.geometry.groups
        self._storage: PagedStorage | None = None
        self._layers: dict[int, _LayerPages] = {}
        # Invariant: both are made by `allocate`, once, and never change after it.

    def identity(self) -> EngineIdentity:
        """See `DecodeBackend`."""
        return self._identity

    @property
    def text(self) -> LoadedModel | None:
        """See `HoldsModel`."""
        return self._text

    def prefill_engine(self) -> PrefillEngine:
        """See `DecodeBackend`."""
        return self._engine

    def allocate(self, page_tokens: int, num_pages: Sequence[int]) -> None:
        """See `DecodeBackend`."""
        geometry = self._identity.geometry
        storage = self._storage = PagedStorage(CacheGeometry.of(geometry, page_tokens), num_pages)
        self._layers = {
            layer_index: _LayerPages(group, *storage.key_value(group.group_index, group_layer))
            for layer_index, (group, group_layer) in geometry.by_layer.items()
        }

    def write(self, place: KVPlace, group_layer: int, keys: Rows, values: Rows) -> None:
        """See `KVStore`."""
        self.storage.write(place, group_layer, keys, values)

    @property
    def storage(self) -> PagedStorage:
        """The pages; only after `allocate`."""
        assert self._storage is not None
        return self._storage

    def describe(self) -> BackendDescription:
        """See `DecodeBackend`."""
        return self._description

    def step(self, batch: Sequence[LaneStep]) -> Logits:
        """See `DecodeBackend`."""
        if not 0 < len(batch) <= self._description.max_lanes:
            raise ValueError(f"a step has 1 to {self._description.max_lanes} lanes, got {len(batch)}")
        plans = [self.plan(group, batch) for group in self._groups]
        cache = _StepCache(self._layers, plans)
        with torch.inference_mode():
            output = self._forward(batch, cache)
            cache.check_complete()
            logits: Logits = output.logits[:, -1].float().numpy()
        return logits

    def plan(self, group: GroupGeometry, batch: Sequence[LaneStep]) -> StepPlan:
        """Return where the rows of a step lie, for the layers of a group; called once a step and group."""
        tables = [lane.tables[group.group_index] for lane in batch]
        return StepPlan(
            [table.row(lane.position) for table, lane in zip(tables, batch, strict=True)],
            [
                _runs(table, Range(group.visible(lane.position).start, lane.position + 1))
                for table, lane in zip(tables, batch, strict=True)
            ],
        )

    def _forward(self, batch: Sequence[LaneStep], cache: _StepCache) -> Any:
        try:
            return self._model(
                input_ids=torch.tensor([[lane.token_id] for lane in batch]),
                position_ids=torch.tensor([[lane.position] for lane in batch]),
                cache=cache,
                use_cache=True,
            )
        except (RuntimeError, IndexError) as error:
            raise EngineFailed(f"step of {len(batch)} lanes: {told(error)}") from error


def make_backend(setup: BackendSetup) -> TorchBackend:
    """Return the backend `torch`; it has no options."""
    setup.options.close()
    ready = prepare(setup, max(setup.max_lanes, STABLE_ROWS))
    return TorchBackend(ready.loaded.model, ready.engine, setup.max_lanes, ready.loaded)


class _LayerPages:
    """The pages of one layer, viewed the two ways a step needs."""

    __slots__ = ("group_index", "keys_1HRD", "keys_RHD", "values_1HRD", "values_RHD", "window")

    def __init__(self, group: GroupGeometry, keys_RHD: Tensor, values_RHD: Tensor) -> None:
        self.group_index = group.group_index
        self.window = group.window
        self.keys_RHD, self.values_RHD = keys_RHD, values_RHD
        self.keys_1HRD, self.values_1HRD = _by_head(keys_RHD), _by_head(values_RHD)


class StepPlan:
    """Where a step's tokens go and what they see, for the layers of one group."""

    __slots__ = ("rows_B", "runs")

    def __init__(self, rows: Sequence[int], runs: Sequence[Runs]) -> None:
        """Take the row of each lane's token, and the runs of what it sees, itself included."""
        self.rows_B = torch.tensor(rows)
        self.runs = runs


class _StepCache:
    """The cache of one forward: writes the new rows and says what each sequence attends to."""

    def __init__(self, layers: dict[int, _LayerPages], plans: Sequence[StepPlan]) -> None:
        self._layers = layers
        self._plans = plans
        self._num_updates = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return nothing of use: positions are given to the model, sequences differ in length."""
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, **_: object
    ) -> tuple[_StepKV, _StepKV]:
        """Take the fresh rows [B, H, 1, D] of a layer; both results are the same `AttendedKV`."""
        pages = self._layers.get(layer_idx)
        if pages is None:
            raise EngineFailed(f"the model stores KV of layer {layer_idx}, which its geometry lacks")
        plan = self._plans[pages.group_index]
        pages.keys_RHD.index_copy_(0, plan.rows_B, key_states[:, :, 0])
        pages.values_RHD.index_copy_(0, plan.rows_B, value_states[:, :, 0])
        self._num_updates += 1
        attended = _StepKV(pages, plan)
        return attended, attended

    def check_complete(self) -> None:
        """Raise EngineFailed unless every KV-owning layer was written once."""
        if self._num_updates != len(self._layers):
            raise EngineFailed(
                f"the model stored KV of {self._num_updates} layers, its geometry has {len(self._layers)}"
            )


class _StepKV:
    """What the lanes of a step attend to in one layer, each its own sequence."""

    __slots__ = ("_pages", "_plan", "window")

    def __init__(self, pages: _LayerPages, plan: StepPlan) -> None:
        self._pages = pages
        self._plan = plan
        self.window = pages.window

    def attend(self, query_BQTD: Tensor, scaling: float | None) -> Tensor:
        pages, runs = self._pages, self._plan.runs
        keys = [_gather(pages.keys_1HRD, pages.keys_RHD, each) for each in runs]
        values = [_gather(pages.values_1HRD, pages.values_RHD, each) for each in runs]
        return attention.attend_each(query_BQTD, keys, values, scaling)


def _by_head(rows_RHD: Tensor) -> Tensor:
    return rows_RHD.transpose(0, 1).unsqueeze(0)


def _runs(table: PageTable, visible: Range) -> Runs:
    return tuple((run.start, len(run)) for run in table.runs(visible))


def _gather(rows_1HRD: Tensor, rows_RHD: Tensor, runs: Runs) -> Tensor:
    """Return a sequence's rows as [1, H, L, D], token-major: a view of one run, a copy of several."""
    if len(runs) == 1:
        start, length = runs[0]
        return rows_1HRD.narrow(2, start, length)
    return _by_head(torch.cat([rows_RHD.narrow(0, start, length) for start, length in runs]))
