"""Rule 10: the same request gives the same tokens and the same KV bits, whichever way its prompt takes.

Compared are `stream`, `whole`, `deferred` and `local`, alone and beside seven others, and, in fp32,
transformers' own `generate`. KV is read from the reserved pages at the moment of publication.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray

from common.kv.ranges import Range
from common.kv.writer import Rows
from common.model.loader import load_model
from decode_service import attempts
from decode_service.cache.storage import Kind
from decode_service.publication import publish
from kvspan.client import Completion
from tests.integration.conftest import LoadPair, shared_pair
from tests.support.cases import prompt_of
from tests.support.fakes import all_wanted
from tests.support.pair import MODES, Pair, make_configs, pages_of

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
"""One; a page, the window, a chunk and two chunks of 64, each less one and plus one; and three chunks."""

NUM_ALONE = 8
NUM_IN_COMPANY = 4
"""Tokens of an answer; a key in the wrong place shows in the log-probability of the second one."""

WAYS: dict[str, dict[str, Any]] = {
    **{mode: {"route": "remote", "transfer": mode} for mode in MODES},
    "local": {"route": "local"},
}

Place = tuple[int, int, int]
"""Model layer, kind, position."""

Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens, and the log-probability of each as exact as the wire has it."""


@dataclass(slots=True)
class RecordingWriter:
    """Keeps a copy of the bytes that an engine hands over, by layer, kind and position."""

    rows: dict[Place, bytes] = field(default_factory=dict)

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Keep every row."""
        for kind, rows in ((Kind.KEYS, keys), (Kind.VALUES, values)):
            for position, row in zip(tokens, rows, strict=True):
                self.rows[layer_index, kind, position] = row.tobytes()


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        (model, dtype, chunk)
        for model in ("tiny:qwen3", "tiny:gemma3", "tiny:llama")
        for dtype in ("float32", "bfloat16")
        for chunk in (64, 256)
    ],
    ids=lambda param: "-".join(map(str, param)),
)
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running pair of each model, dtype and chunk grid."""
    model, dtype, chunk = request.param
    folder = tmp_path_factory.mktemp("pair")
    configs = make_configs(folder, model, dtype=dtype, chunk_tokens=chunk, queue_limit=64)
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


@cache
def generated(model: str) -> dict[int, tuple[int, ...]]:
    """Return what `generate` answers to the prompt of each length, in fp32."""
    stock = load_model(model, "float32", progress=False).model
    answers = {}
    for length in LENGTHS:
        prompt = torch.tensor([prompt_of(length)])
        with torch.inference_mode():
            output = stock.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NUM_ALONE,
                do_sample=False,
                eos_token_id=[],
                pad_token_id=258,
            )
        answers[length] = tuple(output[0, length:].tolist())
    return answers


async def test_rule10_every_way_gives_the_same_tokens_alone_and_in_company(pair: Pair) -> None:
    """Rule 10: alone and beside seven others, by every way, the prompt of each length has one answer."""
    prompts = [prompt_of(length) for length in LENGTHS]
    alone: dict[str, list[Answer]] = {}
    together: dict[str, list[Answer]] = {}

    for way, options in WAYS.items():
        alone[way] = [told(await pair.ask(prompt, NUM_ALONE, **options)) for prompt in prompts]
        together[way] = [told(one) for one in await pair.ask_all(prompts, NUM_IN_COMPANY, **options)]

    expected = alone["stream"]
    assert [way for way, answers in alone.items() if answers != expected] == []
    begun = [(tokens[:NUM_IN_COMPANY], logprobs[:NUM_IN_COMPANY]) for tokens, logprobs in expected]
    assert [way for way, answers in together.items() if answers != begun] == []

    if pair.loaded.decode.backend.identity().geometry.layers[0].dtype.value == "float32":
        stock = generated(pair.loaded.decode.text.name)
        assert [tokens for tokens, _ in expected] == [stock[length] for length in LENGTHS]


async def test_rule10_ways_may_mix_in_one_batch(pair: Pair) -> None:
    """Rule 10: eight requests that take different ways at the same time answer as they do alone."""
    prompts = [prompt_of(40 + 11 * number, seed=number) for number in range(8)]
    ways = [WAYS[name] for name in (*WAYS, *WAYS)]
    alone = [await pair.ask(prompt, 6) for prompt in prompts]

    mixed = await asyncio.gather(
        *(pair.ask(prompt, 6, **way) for prompt, way in zip(prompts, ways, strict=True))
    )

    assert [answer.token_ids for answer in mixed] == [answer.token_ids for answer in alone]


async def test_rule10_pages_hold_the_bits_that_the_engine_produced(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 10: at publication the pages hold, bit for bit, what the engine computes for the same prompt."""
    published: dict[int, dict[Place, bytes]] = {}
    monkeypatch.setattr(attempts, "publish", recording_publish(pair, published))
    prompts = [prompt_of(length, seed=2) for length in (1, 17, 64, 129, 200)]
    expected = {len(prompt): produced(pair, prompt) for prompt in prompts}

    for way, options in WAYS.items():
        published.clear()
        await pair.ask_all(prompts, 1, **options)
        assert published.keys() == expected.keys()
        for length, rows in published.items():
            assert rows == expected[length], f"{way}, {length} tokens"


def recording_publish(pair: Pair, published: dict[int, dict[Place, bytes]]) -> Callable[..., Any]:
    """Return `publish` that also copies every required row out of the pages, by prompt length."""
    geometry, storage = pair.loaded.decode.backend.identity().geometry, pages_of(pair.loaded.decode)

    def recording(reservation: Any, prefill: Any, generation: Any, prompt_len: int, *others: Any) -> Any:
        sequence = publish(reservation, prefill, generation, prompt_len, *others)
        rows: dict[Place, bytes] = {}
        for group, table in zip(geometry.groups, reservation.pages.tables, strict=True):
            for group_layer, layer_index in enumerate(group.layer_indices):
                for kind in Kind:
                    stored: NDArray[np.uint8] = storage.rows(group.group_index, group_layer, kind)
                    for position in group.visible(prompt_len):
                        rows[layer_index, kind, position] = stored[table.row(position)].tobytes()
        published[prompt_len] = rows
        return sequence

    return recording


def produced(pair: Pair, prompt: Sequence[int]) -> dict[Place, bytes]:
    """Return what the prefill engine computes for the positions that decode needs."""
    writer = RecordingWriter()
    engine = pair.loaded.prefill.engine
    engine.prefill(list(prompt), all_wanted(engine.identity().geometry, len(prompt)), writer, lambda: False)
    return writer.rows


def told(completion: Completion) -> Answer:
    """Return what has to be the same by every way."""
    return completion.token_ids, tuple(position.chosen.logprob for position in completion.logprobs)
