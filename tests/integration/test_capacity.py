"""What fits waits its turn, what never fits is told at once with numbers, names are no keys (rows C, I)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.wire.failure import RemoteFailure
from tests.integration.conftest import LoadPair
from tests.support.cases import Oracle, dense_config, prompt_of, save_model
from tests.support.pair import Pair, make_configs, running_pair


@pytest.mark.parametrize(
    ("changes", "length", "num_tokens", "limit"),
    [
        ({"cache_tokens": 256}, 257, 1, "258 of context tokens, the limit is 256"),
        ({"cache_tokens": 256}, 200, 57, "257 of context tokens, the limit is 256"),
        ({"max_prompt_tokens": 100}, 101, 1, "101 of prompt tokens, the limit is 100"),
        ({"slab_bytes": 16 << 10}, 200, 1, "request needs 16384 of slab bytes, the limit is 12288"),
        ({}, 2040, 9, "2049 of context tokens, the limit is 2048"),
    ],
    ids=["c3-pool+1", "c3-growth", "c9-prefill-limit", "c3-slab", "c9-below-the-model"],
)
async def test_c3_c9_w4_what_can_never_fit_is_refused_at_once_with_the_numbers(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    changes: dict[str, Any],
    length: int,
    num_tokens: int,
    limit: str,
) -> None:
    """C3, C9, W4: OUT_OF_RANGE before anything is held, naming need and limit; the service goes on."""
    configs = make_configs(tmp_path, checkpoints["DENSE"], **changes)
    async with running_pair(*configs, load(*configs)) as pair:
        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(prompt_of(length), num_tokens, route="remote")
        counts = (await pair.client.status()).requests
        await pair.ask(prompt_of(5), 1)

    assert caught.value.code is grpc.StatusCode.OUT_OF_RANGE
    assert caught.value.reason == "REQUEST_CAN_NEVER_FIT"
    assert limit in caught.value.message
    assert caught.value.retry_after_s is None
    assert counts.failed == 0


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Oracle]:
    """Return DENSE with two layers, as the second is the first that reads what another one made."""
    config = dense_config(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    folder = save_model(config, tmp_path_factory.mktemp("thin"))
    return folder, Oracle(folder)


@pytest.mark.parametrize("chunk", [1, 7, 15, 16, 17, 31])
async def test_c5_every_chunk_size_continues_as_oracle(
    tmp_path: Path, thin: tuple[str, Oracle], chunk: int
) -> None:
    """C5: with chunks of any size, the prompt of every length from 1 to 70 answers as ORACLE."""
    model, oracle = thin
    configs = make_configs(
        tmp_path, model, page_tokens=1, chunk_tokens=chunk, queue_limit=70, cache_tokens=1024
    )
    prompts = [prompt_of(length, length) for length in range(1, 71)]
    async with running_pair(*configs) as pair:
        for prompt, answer in zip(prompts, await pair.ask_all(prompts, 2), strict=True):
            oracle.assert_greedy(prompt, answer)


@pytest.mark.parametrize(
    "changes",
    [{"lanes": 2}, {"cache_tokens": 160}, {"slab_bytes": 180224}, {"max_concurrency": 1}],
    ids=["lanes", "c1-pages", "slots", "concurrency"],
)
async def test_c1_requests_beyond_the_capacity_wait_and_are_served_in_turn(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    oracles: Callable[[str], Oracle],
    changes: dict[str, Any],
) -> None:
    """C1, C2, H16: ten requests over room for one or two all finish, each with its own answer."""
    configs = make_configs(tmp_path, checkpoints["DENSE"], **changes)
    prompts = [prompt_of(100 + number, seed=number) for number in range(10)]
    async with running_pair(*configs, load(*configs)) as pair:
        for prompt, answer in zip(prompts, await pair.ask_all(prompts, 5), strict=True):
            oracles("DENSE").assert_greedy(prompt, answer)
        counts = (await pair.client.status()).requests

    assert (counts.submitted, counts.finished) == (10, 10)


async def sampled(pair: Pair, seed: int) -> tuple[int, ...]:
    """Return a sampled answer."""
    answer = await pair.ask(prompt_of(50), 12, temperature=1.5, seed=seed, request_id="sibling")
    return answer.token_ids
