"""Tests of `common/model/forward/prefill.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from common.errors import Cancelled, EngineFailed, PromptTooLong
from common.kv.ranges import Range
from common.kv.writer import Rows
from common.model.folder.source import TinyFamily
from common.model.forward.prefill import ChunkedPrefill, grid, to_rows
from tests.support.models import (
    RecordingWriter,
    TinyModel,
    dense,
    make_model,
    make_prompt,
    never,
    torch_threads,
)

CHUNK, MAX_PROMPT = 32, 150


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread unless a test says otherwise: tiny products are slower on two."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def hybrid() -> TinyModel:
    """Five layers with a window of 24, one without."""
    return make_model(TinyFamily.GEMMA3, window=24)


def make_prefill(tiny: TinyModel, chunk_tokens: int = CHUNK) -> ChunkedPrefill:
    """Return a fresh prefill over a shared model."""
    return ChunkedPrefill(tiny.model, tiny.geometry, chunk_tokens, MAX_PROMPT)


def run(prefill: ChunkedPrefill, prompt: list[int], first_token: int = 0) -> tuple[RecordingWriter, bytes]:
    """Return what was written, and the logits."""
    writer = RecordingWriter()
    logits = prefill.prefill(prompt, dense(prefill.geometry, len(prompt), first_token), writer, never)
    return writer, logits.tobytes()


def cancel_at(call: int) -> Callable[[], bool]:
    """Return an `is_cancelled` that turns true at this call, counted from one."""
    calls = itertools.count(1)
    return lambda: next(calls) >= call


@pytest.mark.parametrize(
    ("prompt_len", "chunks"),
    [(1, [(0, 1)]), (32, [(0, 32)]), (33, [(0, 32), (32, 33)]), (70, [(0, 32), (32, 64), (64, 70)])],
)
def test_chunks_lie_on_absolute_multiples(prompt_len: int, chunks: list[tuple[int, int]]) -> None:
    """Only the last chunk may be short."""
    assert list(grid(prompt_len, CHUNK)) == [Range(*chunk) for chunk in chunks]


def test_every_layer_writes_each_chunk_once_in_model_order(hybrid: TinyModel) -> None:
    """A writer sees layers 0 to 5 of one chunk before the next chunk."""
    writer, _ = run(make_prefill(hybrid), make_prompt(70))

    expected = [(layer, chunk) for chunk in grid(70, CHUNK) for layer in range(6)]
    assert [(layer, tokens) for layer, tokens, _, _ in writer.writes] == expected


@pytest.mark.parametrize(("first_token", "ranges"), [(32, [(32, 64), (64, 70)]), (45, [(45, 64), (64, 70)])])
def test_only_exported_positions_are_written(
    hybrid: TinyModel, first_token: int, ranges: list[tuple[int, int]]
) -> None:
    """Positions before the first one to export are computed and not written; the bytes are the same."""
    prompt = make_prompt(70)
    whole, logits = run(make_prefill(hybrid), prompt)

    part, part_logits = run(make_prefill(hybrid), prompt, first_token)

    assert part_logits == logits
    assert [tokens for layer, tokens, _, _ in part.writes if layer == 0] == [Range(*r) for r in ranges]
    for layer, tokens, keys, values in part.writes:
        full = next(w for w in whole.writes if w[0] == layer and w[1].contains(tokens))
        assert full[2].endswith(keys)
        assert full[3].endswith(values)


@pytest.fixture(scope="module", params=list(TinyFamily), ids=str)
def each_family(request: pytest.FixtureRequest) -> TinyModel:
    """Return a model of each family once."""
    return make_model(request.param)


@pytest.mark.parametrize("prompt_len", [1, 31, 32, 33, 100])
def test_keys_values_and_logits_are_those_of_the_model(each_family: TinyModel, prompt_len: int) -> None:
    """Chunking changes rounding only: transformers' own cache holds the same, 1e-4 for the other sums."""
    tiny, prompt = each_family, make_prompt(prompt_len)
    writer, logits = run(make_prefill(tiny), prompt)
    with torch.inference_mode():
        expected = tiny.reference(torch.tensor([prompt]), logits_to_keep=1)

    np.testing.assert_allclose(
        np.frombuffer(logits, np.float32), expected.logits[0, -1].numpy(), rtol=1e-4, atol=1e-4
    )
    for layer in tiny.geometry.layers:
        held = expected.cache.layers[layer.layer_index].keys[0].transpose(0, 1).reshape(-1)
        written = b"".join(keys for index, _, keys, _ in writer.writes if index == layer.layer_index)
        got = torch.frombuffer(bytearray(written), dtype=torch.float32)[-len(held) :]
        torch.testing.assert_close(got, held[-len(got) :], rtol=1e-4, atol=1e-4)


def test_bits_are_a_function_of_tokens_and_grid(hybrid: TinyModel) -> None:
    """Another prompt before, another number of threads, another object: nothing changes a bit."""
    prompt = make_prompt(100)
    used = make_prefill(hybrid)
    run(used, make_prompt(131, seed=7))
    expected = run(make_prefill(hybrid), prompt)

    again = [run(used, prompt), run(used, prompt)]
    with torch_threads(2):
        again.append(run(used, prompt))

    assert all(outcome == expected for outcome in again)


def test_whole_chunks_have_the_same_bits_when_the_prompt_goes_on(hybrid: TinyModel) -> None:
    """What a prefix hit on the grid reuses does not depend on what followed it."""
    prompt = make_prompt(100)
    longer, _ = run(make_prefill(hybrid), prompt)

    shorter, _ = run(make_prefill(hybrid), prompt[:64])

    assert longer.writes[: len(shorter.writes)] == shorter.writes


@pytest.mark.parametrize("call", [1, 4, 9])
def test_prefill_ends_and_stays_usable_when_cancelled(hybrid: TinyModel, call: int) -> None:
    """A cancel in any layer of any chunk ends the prompt; the next one is as if nothing had been."""
    prefill, prompt = make_prefill(hybrid), make_prompt(70)
    writer = RecordingWriter()

    with pytest.raises(Cancelled):
        prefill.prefill(prompt, dense(hybrid.geometry, 70), writer, cancel_at(call))

    assert len(writer.writes) == call - 1
    assert run(prefill, prompt) == run(make_prefill(hybrid), prompt)


def test_prefill_refuses_what_is_too_long(hybrid: TinyModel) -> None:
    """The limit is told with the numbers, before anything is computed."""
    writer = RecordingWriter()

    with pytest.raises(PromptTooLong, match="151"):
        make_prefill(hybrid).prefill(make_prompt(151), dense(hybrid.geometry, 151), writer, never)

    assert writer.writes == []


def test_prefill_fails_by_name_when_a_token_is_unknown(hybrid: TinyModel) -> None:
    """What torch raises reaches the caller as an error of the engine."""
    with pytest.raises(EngineFailed, match="prefill of"):
        run(make_prefill(hybrid), [5, 100_000])


def test_construction_refuses_chunks_without_tokens(hybrid: TinyModel) -> None:
    """No prompt would ever end."""
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        make_prefill(hybrid, chunk_tokens=0)


def test_working_store_is_bounded_by_window_and_longest_prompt(hybrid: TinyModel) -> None:
    """Full layers keep the longest prompt, windowed ones a window and a chunk, and it never grows."""
    prefill = make_prefill(hybrid)
    row_bytes = 2 * 2 * 16 * 4
    expected = row_bytes * (MAX_PROMPT + 5 * (23 + CHUNK))
    before = prefill.store_bytes

    run(prefill, make_prompt(MAX_PROMPT))

    assert before == prefill.store_bytes == expected


def test_rows_are_the_widest_words_that_fit() -> None:
    """Rows are views of the tensor's own bytes, in words of 8, 4 or 2 bytes."""
    tensors = [torch.arange(5 * 3 * dim, dtype=torch.int16).view(5, 3, dim) for dim in (4, 6, 7)]

    rows = [to_rows(tensor) for tensor in tensors]

    assert [(array.shape, array.itemsize) for array in rows] == [
        ((5, 3, 1), 8),
        ((5, 3, 3), 4),
        ((5, 3, 7), 2),
    ]
    assert all(a.tobytes() == t.numpy().tobytes() for a, t in zip(rows, tensors, strict=True))
    assert all(np.shares_memory(a, t.numpy()) for a, t in zip(rows, tensors, strict=True))


def test_writer_error_reaches_the_caller_unchanged(hybrid: TinyModel) -> None:
    """An error of the seam is the writer's own, not the engine's."""

    class Full:
        def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
            raise PromptTooLong("slot bytes", 7, 5)

    with pytest.raises(PromptTooLong, match="slot bytes"):
        make_prefill(hybrid).prefill(make_prompt(5), dense(hybrid.geometry, 5), Full(), never)
