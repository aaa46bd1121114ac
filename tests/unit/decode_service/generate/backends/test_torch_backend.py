"""Tests of `decode_service/generate/backends/torch_backend.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from common.engine.decode import LaneStep
from common.engine.prefill import Logits
from common.errors import EngineFailed
from common.kv.geometry import DType
from common.kv.tables import PageTable
from common.model.folder.source import TinyFamily
from common.model.forward.prefill import ChunkedPrefill
from tests.support.models import (
    MAX_LANES,
    PagedRunner,
    PagedSequence,
    TinyModel,
    generate,
    make_model,
    make_prompt,
    torch_threads,
)

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
"""Around pages of 16, windows of 24 and 32, and chunks of 16, 64 and 256."""

MODELS: tuple[tuple[TinyFamily, int | None], ...] = (
    (TinyFamily.LLAMA, None),
    (TinyFamily.QWEN3, None),
    (TinyFamily.GEMMA3, 32),
    (TinyFamily.GEMMA3, 24),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread unless a test says otherwise: tiny products are slower on two."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module", params=MODELS, ids=str)
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    """Return each model once, in float32."""
    family, window = request.param
    return make_model(family, window=window)


@pytest.fixture(scope="module")
def expected(tiny: TinyModel) -> dict[int, list[int]]:
    """Return what transformers' own `generate` continues a prompt of each length with."""
    return {length: generate(tiny.reference, make_prompt(length, length), 4) for length in LENGTHS}


@pytest.mark.parametrize("chunk_tokens", [16, 64, 256])
def test_greedy_tokens_are_those_of_generate(
    tiny: TinyModel, expected: dict[int, list[int]], chunk_tokens: int
) -> None:
    """Prefill in chunks, KV through scattered pages and paged steps give transformers' own tokens."""
    prefill = ChunkedPrefill(tiny.model, tiny.geometry, chunk_tokens, 256)
    runner = PagedRunner(tiny, num_pages=200, shuffle_seed=1)

    for length in LENGTHS:
        sequence, logits = runner.start(prefill, make_prompt(length, length), growth=8)
        assert runner.decode(sequence, logits, 4) == expected[length]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("family", list(TinyFamily))
def test_logits_do_not_depend_on_batch_order_or_pages(family: TinyFamily, dtype: DType, threads: int) -> None:
    """A sequence alone in adjacent pages and among seven others in scattered ones: the same bits."""
    prompts = [make_prompt(length, length) for length in (1, 17, 33, 40, 64, 70, 100, 129)]
    with torch_threads(threads):
        tiny = make_model(family, dtype=dtype)
        prefill = ChunkedPrefill(tiny.model, tiny.geometry, 32, 256)
        alone, together = PagedRunner(tiny), PagedRunner(tiny, shuffle_seed=2)
        one_by_one = [alone.start(prefill, prompt)[0] for prompt in prompts]
        sequences = [together.start(prefill, prompt)[0] for prompt in prompts]
        for step in range(3):
            single = [alone.backend.step([lane(one, step)])[0] for one in one_by_one]
            assert_same_bits(step_shuffled(together, sequences, step), single)
            for sequence in (*one_by_one, *sequences):
                sequence.position += 1


def lane(sequence: PagedSequence, step: int) -> LaneStep:
    """Return a step with a token that is known in advance."""
    return sequence.lane((sequence.position * 7 + step) % 256)


def step_shuffled(runner: PagedRunner, sequences: Sequence[PagedSequence], step: int) -> list[Logits]:
    """Run all sequences in one step, in an order of its own; return their rows in the given order."""
    order = list(range(len(sequences)))
    random.Random(step).shuffle(order)
    rows = runner.backend.step([lane(sequences[index], step) for index in order])
    return [rows[order.index(index)] for index in range(len(sequences))]


def assert_same_bits(actual: Sequence[Logits], expected: Sequence[Logits]) -> None:
    """Fail with the sequences whose logits differ."""
    differing = [
        index for index, rows in enumerate(zip(actual, expected, strict=True)) if not np.array_equal(*rows)
    ]
    assert not differing, f"sequences {differing} have other bits"


@pytest.fixture(scope="module")
def llama() -> TinyModel:
    """Return one model of full attention."""
    return make_model()


def make_runner(llama: TinyModel) -> tuple[PagedRunner, PagedSequence]:
    """Return a runner with one sequence of 20 tokens."""
    runner = PagedRunner(llama, num_pages=7)
    sequence, _ = runner.start(ChunkedPrefill(llama.model, llama.geometry, 16, 64), make_prompt(20), growth=8)
    return runner, sequence


def test_step_writes_the_row_of_its_own_position_only(llama: TinyModel) -> None:
    """Every other row of every page is what it was."""
    runner, sequence = make_runner(llama)
    keys, _ = runner.backend.storage.key_value(0, 3)
    before = keys.clone()

    runner.backend.step([sequence.lane(5)])

    changed = (keys != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [sequence.tables[0].row(20)]


def test_step_sees_the_rows_in_its_pages(llama: TinyModel) -> None:
    """A changed value in one visible row changes the logits."""
    runner, sequence = make_runner(llama)
    before = runner.backend.step([sequence.lane(5)])

    runner.backend.storage.key_value(0, 0)[1][sequence.tables[0].row(11)] += 1

    assert not np.array_equal(runner.backend.step([sequence.lane(5)]), before)


def test_windowed_step_needs_no_page_outside_its_window() -> None:
    """A table whose first pages were dropped gives the same bits."""
    tiny = make_model(TinyFamily.GEMMA3, window=24)
    runner = PagedRunner(tiny)
    sequence, _ = runner.start(ChunkedPrefill(tiny.model, tiny.geometry, 64, 128), make_prompt(70), growth=32)
    sequence.position = 72
    whole = runner.backend.step([sequence.lane(5)])

    windowed, full = sequence.tables
    visible = tiny.geometry.groups[0].visible(72)
    dropped = visible.start // 16 - windowed.first_page
    assert dropped > 0
    shorter = PageTable(16, windowed.first_page + dropped, windowed.pages[dropped:])

    assert np.array_equal(runner.backend.step([LaneStep(5, 72, (shorter, full))]), whole)


@pytest.mark.parametrize("num_lanes", [0, MAX_LANES + 1])
def test_step_refuses_a_batch_that_is_no_batch(llama: TinyModel, num_lanes: int) -> None:
    """The scheduler never sends more than the lanes, nor nothing."""
    runner, sequence = make_runner(llama)

    with pytest.raises(ValueError, match="lanes"):
        runner.backend.step([sequence.lane(5)] * num_lanes)


def test_step_fails_by_name_when_a_token_is_unknown(llama: TinyModel) -> None:
    """What torch raises reaches the caller as an error of the engine."""
    runner, sequence = make_runner(llama)

    with pytest.raises(EngineFailed, match="step of 1 lanes"):
        runner.backend.step([sequence.lane(100_000)])


def test_logits_are_one_float32_row_a_lane(llama: TinyModel) -> None:
    """In the order of the batch, whatever the model's own type."""
    runner, sequence = make_runner(llama)

    logits = runner.backend.step([sequence.lane(5), LaneStep(7, 21, sequence.tables)])

    assert logits.shape == (2, 259)
    assert logits.dtype == np.float32
