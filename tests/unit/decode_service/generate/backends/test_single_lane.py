"""One sequence in one contiguous cache: the bits of the paged backend, whatever was there before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from common.engine.decode import KVPlace, LaneStep
from common.engine.prefill import Logits
from common.errors import ConfigError
from common.kv.ranges import Range
from common.kv.tables import PageTable
from common.model.folder.source import TinyFamily
from common.model.forward.prefill import ChunkedPrefill
from common.model.torch_engine import TorchEngine
from decode_service.cache.cache import KVCache
from decode_service.cache.spec import pool_pages
from decode_service.generate.backends.single_lane import SingleLaneBackend, make_backend
from decode_service.prefill.page_writer import PageWriter
from tests.support.factories import paged
from tests.support.fakes import all_wanted, make_engine_identity
from tests.support.models import (
    PAGE_TOKENS,
    PagedRunner,
    TinyModel,
    make_model,
    make_prompt,
    never,
    torch_threads,
)
from tests.support.setups import make_setup

LENGTHS = (1, 16, 17, 31, 33, 70)
NUM_STEPS = 60
"""More than twice the window."""

MODELS = ((TinyFamily.LLAMA, None), (TinyFamily.QWEN3, None), (TinyFamily.GEMMA3, 24))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: tiny products are slower on two."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module", params=MODELS, ids=str)
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    """Return each model once."""
    family, window = request.param
    return make_model(family, window=window)


class Lane:
    """A single-lane backend with a cache for one request."""

    def __init__(self, tiny: TinyModel) -> None:
        self.geometry = tiny.geometry
        self.prefill = ChunkedPrefill(tiny.model, tiny.geometry, 32, 256)
        engine = TorchEngine(self.prefill, make_engine_identity(tiny.geometry), ("tiny",))
        self.backend = SingleLaneBackend(tiny.model, engine)
        shape = paged(tiny.geometry, PAGE_TOKENS)
        pages = pool_pages(shape, 256, 1)
        self.backend.allocate(PAGE_TOKENS, pages)
        self.cache = KVCache(shape, pages)

    def rows(self, prompt: list[int], tokens: list[int]) -> list[Logits]:
        """Return the logits of a request: the handed-over ones, then those after each of `tokens`."""
        held = self.cache.reserve(len(prompt), len(tokens) + 1)
        required = self.geometry.required(0, len(prompt))
        writer = PageWriter(self.backend, self.geometry, held.tables, required)
        rows = [self.prefill.prefill(prompt, all_wanted(self.geometry, len(prompt)), writer, never)]
        for position, token in enumerate(tokens, len(prompt)):
            (row,) = self.backend.step([LaneStep(token, position, held.advance(position))])
            rows.append(row)
        self.cache.give_back(held)
        return rows


def paged_rows(tiny: TinyModel, prompt: list[int], tokens: list[int]) -> list[Logits]:
    """Return the same of the backend with pages."""
    runner = PagedRunner(tiny, shuffle_seed=3)
    prefill = ChunkedPrefill(tiny.model, tiny.geometry, 32, 256)
    sequence, first = runner.start(prefill, prompt, growth=len(tokens) + 1)
    rows = [first]
    for token in tokens:
        rows.append(runner.backend.step([sequence.lane(token)])[0])
        sequence.position += 1
    return rows


def test_s14_one_request_after_the_other_has_the_bits_of_the_paged_backend(tiny: TinyModel) -> None:
    """S14: around pages and window, far beyond the window, with what earlier ones left in the rows."""
    lane = Lane(tiny)

    for length in LENGTHS:
        prompt, tokens = make_prompt(length, length), make_prompt(NUM_STEPS, 9)
        expected = paged_rows(tiny, prompt, tokens)
        assert all(map(np.array_equal, lane.rows(prompt, tokens), expected)), length


def test_rows_that_nobody_wrote_are_never_read(tiny: TinyModel) -> None:
    """Every row full of NaN before: one of them in a sum would show."""
    lane, prompt, tokens = Lane(tiny), make_prompt(17), make_prompt(NUM_STEPS, 9)
    for group in tiny.geometry.groups:
        for layer in range(group.num_layers):
            for rows in lane.backend.storage.key_value(group.group_index, layer):
                rows[:] = float("nan")

    assert all(map(np.array_equal, lane.rows(prompt, tokens), paged_rows(tiny, prompt, tokens)))


def test_more_than_one_lane_is_refused_before_a_model_is_loaded() -> None:
    """With the flag that helps."""
    with pytest.raises(ConfigError, match=r"lanes=4: --backend=single-lane has one: give --lanes=1"):
        make_backend(make_setup("no such folder", max_lanes=4))


def test_it_says_that_nobody_may_write_while_it_steps() -> None:
    """And has one lane."""
    backend = make_backend(make_setup(max_lanes=1))

    description = backend.describe()

    assert (description.name, description.max_lanes, description.writes_while_stepping) == (
        "single-lane",
        1,
        False,
    )


def test_a_table_beyond_its_memory_is_a_fault_of_ours() -> None:
    """Admission reserves no more pages than there are; a row behind the end would be another layer's."""
    lane = Lane(make_model())
    rows = np.zeros((1, lane.geometry.layers[0].num_kv_heads, 4), np.uint8)

    with pytest.raises(ValueError, match="positions, room for"):
        lane.backend.write(KVPlace(0, PageTable(16, 0, tuple(range(90))), Range(0, 1)), 0, rows, rows)
