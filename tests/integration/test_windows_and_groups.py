"""Windows and groups (rows S, H18): every length continues as ORACLE does, whatever the pages hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.kv.plan import plan_spans
from common.session.identity import NumericsPolicy
from common.wire.failure import RemoteFailure
from decode_service.app import Loaded
from decode_service.cache.storage import Kind, PagedStorage
from decode_service.generate.backends.torch_backend import TorchBackend
from decode_service.prefill import importer
from kvspan.v1 import transfer_pb2
from tests.integration.conftest import LoadPair, shared_pair
from tests.integration.test_publication import digest_after
from tests.support.cases import Oracle, prompt_of
from tests.support.factories import plan_of
from tests.support.gates import Gate, lying
from tests.support.pair import MODES, Pair, make_configs, pages_of, running_pair, wait_until

S1_LENGTHS = (31, 32, 33, 47, 48, 49, 63, 64, 65, 200)
WINDOW = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["HYB", "HYB_ODD", "SHARE", "UNEVEN"])
async def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: dict[str, str],
    load: LoadPair,
) -> AsyncIterator[Pair]:
    """Return a running pair of each model with groups."""
    configs = make_configs(tmp_path_factory.mktemp("pair"), checkpoints[request.param])
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


@pytest.fixture
def oracle(oracles: Callable[[str], Oracle], pair: Pair) -> Oracle:
    """Return the ORACLE of the pair's model."""
    return oracles(pair.loaded.decode.text.name)


def poison(storage: PagedStorage, num_groups: int) -> None:
    """Fill every page with bytes that are no number in fp32, so that whoever reads one returns nonsense."""
    for group in range(num_groups):
        layer = 0
        while True:
            try:
                for kind in Kind:
                    storage.rows(group, layer, kind)[...] = 0xFF
            except IndexError:
                break
            layer += 1


async def assert_greedy(
    pair: Pair, oracle: Oracle, prompts: Sequence[Sequence[int]], num_tokens: int = 4, **options: Any
) -> None:
    """Ask all prompts at once and compare each answer with ORACLE."""
    for prompt, completion in zip(prompts, await pair.ask_all(prompts, num_tokens, **options), strict=True):
        oracle.assert_greedy(prompt, completion)


@pytest.mark.parametrize("mode", MODES)
async def test_s1_s14_h18_a_hybrid_prompt_continues_as_oracle_at_every_length(
    pair: Pair, oracle: Oracle, mode: str
) -> None:
    """S1, S14, H18: at and around window and page borders the answer is ORACLE's, in every mode."""
    await assert_greedy(pair, oracle, [prompt_of(length, length) for length in S1_LENGTHS], transfer=mode)


async def test_s1_the_window_slides_over_many_pages_while_decoding(pair: Pair, oracle: Oracle) -> None:
    """S1: an answer longer than the window, which reuses its pages in turn, is ORACLE's to the end."""
    await assert_greedy(pair, oracle, [prompt_of(41), prompt_of(90)], 2 * WINDOW + 9)


@pytest.mark.parametrize("length", [40, 500])
async def test_s14_a_prompt_of_many_tokens_takes_the_pages_of_one_window(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """S14: however long the prompt and the answer, a windowed group holds what its window can touch."""
    gate, num_tokens = Gate(), WINDOW + 9
    groups = pair.loaded.decode.backend.identity().geometry.groups
    full, windowed = -(-(length + num_tokens - 1) // 16), 1 + WINDOW // 16
    monkeypatch.setattr(importer, "digest", digest_after(gate))
    asked = asyncio.create_task(pair.ask(prompt_of(length), num_tokens))
    await wait_until(lambda: gate.num_arrived == 1)
    held = [group.used_pages for group in (await pair.client.status()).groups]
    gate.open()

    assert held == [windowed if group.window else full for group in groups]
    oracle.assert_greedy(prompt_of(length), await asked)


async def test_s15_bytes_that_were_not_sent_are_never_read(pair: Pair, oracle: Oracle) -> None:
    """S15: with every page full of NaN before, a prompt of 17 tokens and longer ones answer as ORACLE."""
    poison(pages_of(pair.loaded.decode), len(pair.loaded.decode.backend.identity().geometry.groups))

    await assert_greedy(pair, oracle, [prompt_of(length) for length in (1, 15, 17, 50, 130)], 20)


@pytest.mark.parametrize("length", [1, 31, 33, 64, 200])
async def test_s3_only_window_and_full_layers_positions_are_sent(pair: Pair, length: int) -> None:
    """S3: bytes sent are those of the visible positions of each group, once, not of the whole prompt."""
    geometry = pair.loaded.decode.backend.identity().geometry
    granularity = pair.decode.peers[0].session.welcome.granularity  # type: ignore[union-attr]

    completion = await pair.ask(prompt_of(length), 1)

    exact = sum(g.token_bytes * len(g.visible(length)) for g in geometry.groups)
    planned = plan_of(geometry, 0, length, granularity).total_bytes
    assert completion.timings.num_bytes == planned
    assert exact <= planned < exact + 64 * 2 * len(geometry.layers) * (length // 64 + 2)


async def test_s5_s9_status_and_capabilities_name_every_group(pair: Pair) -> None:
    """S5, S9: an operator sees two groups in force, each with its own pages and page size."""
    status, told = await pair.client.status(), await pair.client.capabilities()
    groups = pair.loaded.decode.backend.identity().geometry.groups

    assert [group.page_bytes for group in status.groups] == [g.token_bytes * 16 for g in groups]
    full, windowed = 2048 // 16, 8 * (1 + WINDOW // 16)
    assert [group.total_pages for group in status.groups] == [windowed if g.window else full for g in groups]
    assert [group.total_pages for group in status.groups] == list(pair.loaded.decode.num_pages)
    owned = {layer.layer_index: layer for layer in told.identity.geometry.layers}
    assert {index: (layer.head_dim, layer.window) for index, layer in owned.items()} == {
        index: (g.head_dim, g.window or 0) for g in groups for index in g.layer_indices
    }


async def test_s11_every_length_of_an_odd_window_continues_as_oracle(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracles: Callable[[str], Oracle]
) -> None:
    """S11: with a window that no page divides, prompts of 1 to 80 tokens answer as ORACLE."""
    configs = make_configs(tmp_path, checkpoints["HYB_ODD"], queue_limit=80)
    async with running_pair(*configs, load(*configs)) as pair:
        prompts = [prompt_of(length, length) for length in range(1, 81)]
        await assert_greedy(pair, oracles("HYB_ODD"), prompts, 3)


FIXED = {
    "engine": "fixed-width",
    "engine_option": ("widths=7,31", "layer_group=4"),
    "numerics": NumericsPolicy.DECLARED,
}
"""Passes that no page, no window and no chunk divides, whose layers leave in groups of both kinds."""


async def test_s11_every_length_of_an_odd_window_continues_as_oracle_after_fixed_widths(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracles: Callable[[str], Oracle]
) -> None:
    """S11: prompts of 1 to 80 tokens that another engine computed in odd passes answer as ORACLE."""
    configs = make_configs(tmp_path, checkpoints["HYB_ODD"], queue_limit=80, **FIXED)
    async with running_pair(*configs, load(*configs)) as pair:
        prompts = [prompt_of(length, length) for length in range(1, 81)]
        await assert_greedy(pair, oracles("HYB_ODD"), prompts, 3)


@pytest.mark.parametrize("model", ["HYB", "SHARE", "UNEVEN"])
async def test_s1_s3_h18_fixed_widths_send_the_window_of_every_model_with_groups(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    oracles: Callable[[str], Oracle],
    model: str,
) -> None:
    """S1, S3, H18: at each border the answer is ORACLE's in every mode, and no more is sent than is seen."""
    configs = make_configs(tmp_path, checkpoints[model], **FIXED)
    async with running_pair(*configs, load(*configs)) as pair:
        prompts = [prompt_of(length, length) for length in S1_LENGTHS]
        for mode in MODES:
            await assert_greedy(pair, oracles(model), prompts, transfer=mode)
        (session,) = (peer.session for peer in pair.decode.peers)
        assert session is not None
        geometry, granularity = session.geometry, session.welcome.granularity
        exact = sum(group.token_bytes * len(group.visible(200)) for group in geometry.groups)
        planned = plan_spans(geometry, geometry.required(0, 200), granularity).total_bytes
        sent = (await pair.ask(prompt_of(200), 1)).timings.num_bytes
        assert sent == planned
        assert exact <= sent < exact + 64 * 2 * len(geometry.layers) * (200 // 31 + 2)


def swap_groups(span: transfer_pb2.KVSpan) -> None:
    """Tell the span for the other group."""
    span.group_index = 1 - span.group_index


async def test_s4_s8_a_span_of_another_group_or_position_is_refused(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    oracles: Callable[[str], Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S4, S8: group and positions on the wire are checked; a lie fails its request and no other."""
    configs = make_configs(tmp_path, checkpoints["HYB"])
    prompt = prompt_of(100)
    async with running_pair(*configs, load(*configs)) as pair:
        with monkeypatch.context() as patch:
            lying(patch, swap_groups)
            with pytest.raises(RemoteFailure) as caught:
                await pair.ask(prompt, 2)
        assert caught.value.code.name == "DATA_LOSS"
        await pair.wait_idle()
        oracles("HYB").assert_greedy(prompt, await pair.ask(prompt, 2))


def with_pools(loaded: Loaded, lanes: int, num_pages: tuple[int, ...]) -> Loaded:
    """Return a loaded decode service with pools of these sizes."""
    old = loaded.backend
    assert isinstance(old, TorchBackend)
    assert old.text is not None
    backend = TorchBackend(old.text.model, old.prefill_engine(), lanes, old.text)
    backend.allocate(16, num_pages)
    return replace(loaded, backend=backend, num_pages=num_pages)
