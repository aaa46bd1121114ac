"""Engines of other kinds than the first pair: the same tokens by every way that ends in one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.engine.prefill import Logits, PrefillEngine, Wanted
from common.kv.plan import plan_spans
from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows
from common.session.identity import NumericsPolicy
from common.wire.failure import RemoteFailure
from tests.integration.conftest import LoadPair
from tests.support.cases import prompt_of
from tests.support.gates import Prefill, with_engine
from tests.support.pair import MODES, make_configs, running_pair

LENGTHS = (1, 31, 32, 33, 63, 64, 65, 130)
"""Around the widths 32 and 64, and in three passes."""

FIXED = {"engine": "fixed-width", "engine_option": ("widths=32,64", "layer_group=3")}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
async def test_c5_s1_every_mode_gives_the_tokens_of_a_fixed_width_engine(
    tmp_path: Path, load: LoadPair, family: str
) -> None:
    """C5, S1: alone and two at a time; nothing of a whole one is imported before its end."""
    configs = make_configs(tmp_path, f"tiny:{family}", numerics=NumericsPolicy.DECLARED, **FIXED)
    prompts = [prompt_of(length, length) for length in LENGTHS]
    async with running_pair(*configs, load(*configs)) as pair:
        reference = [(await pair.ask(prompt, 5, transfer="whole")).token_ids for prompt in prompts]
        for mode in MODES:
            alone = [await pair.ask(prompt, 5, transfer=mode) for prompt in prompts]
            assert [answer.token_ids for answer in alone] == reference
            assert {answer.prefill_engine.name for answer in alone} == {"fixed-width"}
            early = [answer.timings.num_spans_overlapped for answer in alone]
            assert mode == "stream" or not any(early)
            for first, second in zip(range(0, 8, 2), range(1, 8, 2), strict=True):
                pairs = await pair.ask_all([prompts[first], prompts[second]], 5, transfer=mode)
                assert [answer.token_ids for answer in pairs] == reference[first : second + 1]


@pytest.mark.parametrize("engine", [{}, FIXED], ids=["torch", "fixed-width"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
async def test_s14_c6_a_single_lane_answers_one_request_after_the_other(
    tmp_path: Path, load: LoadPair, family: str, engine: dict[str, Any]
) -> None:
    """S14, C6: by every mode, two at a time, the tokens of the paged backend's whole reference."""
    prompts = [prompt_of(length, length) for length in (1, 33, 65, 130)]
    declared = {"numerics": NumericsPolicy.DECLARED, **engine}
    (tmp_path / "pages").mkdir()
    configs = make_configs(tmp_path / "pages", f"tiny:{family}", **declared)
    async with running_pair(*configs, load(*configs)) as pair:
        reference = [(await pair.ask(prompt, 40, transfer="whole")).token_ids for prompt in prompts]
    (tmp_path / "lane").mkdir()
    changes = {"backend": "single-lane", "lanes": 1, **declared}
    configs = make_configs(tmp_path / "lane", f"tiny:{family}", **changes)
    async with running_pair(*configs, load(*configs)) as pair:
        for mode in MODES:
            for first, second in ((0, 1), (2, 3)):
                answers = await pair.ask_all([prompts[first], prompts[second]], 40, transfer=mode)
                assert [answer.token_ids for answer in answers] == reference[first : second + 1]


async def test_p11_n2_services_with_other_pages_and_other_widths_pair(tmp_path: Path, load: LoadPair) -> None:
    """P11: the size of a page is decode's own business, whatever the producer's passes are."""
    answers = []
    for page_tokens in (16, 64):
        folder = tmp_path / str(page_tokens)
        folder.mkdir()
        changes = {"page_tokens": page_tokens, "numerics": NumericsPolicy.DECLARED, **FIXED}
        configs = make_configs(folder, "tiny:gemma3", **changes)
        async with running_pair(*configs, load(*configs)) as pair:
            asked = await pair.ask_all([prompt_of(length) for length in LENGTHS], 6)
            answers.append([answer.token_ids for answer in asked])

    assert answers[0] == answers[1]


async def test_a_single_pass_engine_delivers_layer_by_layer(tmp_path: Path, load: LoadPair) -> None:
    """C9: a group of layers leaves for the whole prompt, and what is planned is what comes."""
    option = ("widths=32,64", "layer_group=2", "passes=one")
    configs = make_configs(
        tmp_path, engine="fixed-width", engine_option=option, numerics=NumericsPolicy.DECLARED
    )
    async with running_pair(*configs, load(*configs)) as pair:
        prompt = prompt_of(64)
        answers = [await pair.ask(prompt, 4, transfer=mode) for mode in MODES]

        assert len({answer.token_ids for answer in answers}) == 1
        (session,) = (peer.session for peer in pair.decode.peers)
        assert session is not None
        granularity = session.welcome.granularity
        assert (granularity.chunk_tokens, granularity.layer_stops) == (0, (2, 4))
        plan = plan_spans(session.geometry, session.geometry.required(0, 64), granularity)
        assert {answer.timings.num_spans for answer in answers} == {plan.num_spans}
        (peer,) = (await pair.client.status()).peers
        assert "numerics.chunk_tokens" in [one.field for one in peer.differences]


SHAPE = ("layers=4", "kv_heads=2", "head_dim=64", "dtype=bfloat16", "window=100")


async def test_x1_a_replayed_prompt_arrives_as_it_was_made(tmp_path: Path, load: LoadPair) -> None:
    """X1: no model on either side, every row checked on arrival, by every mode, two at a time."""
    configs = make_configs(
        tmp_path, engine="replay", engine_option=SHAPE, backend="replay", backend_option=SHAPE
    )
    async with running_pair(*configs, load(*configs)) as pair:
        for mode in MODES:
            prompts = [[7, 8, 9] * 200, [40, 41]]
            answers = await pair.ask_all(prompts, 3, transfer=mode)
            assert [answer.token_ids for answer in answers] == [(10, 11, 12), (42, 43, 44)]
            assert answers[0].timings.num_bytes >= 4 * 2 * 256 * 99


async def test_w1_a_replayed_row_that_is_wrong_fails_its_request(tmp_path: Path, load: LoadPair) -> None:
    """W1: with another pattern on the other side nothing is published, and the next request is served."""
    configs = make_configs(
        tmp_path, engine="replay", engine_option=SHAPE, backend="replay", backend_option=SHAPE
    )
    copies = load(*configs)
    honest = copies.prefill.engine

    def shifted(inner: PrefillEngine) -> Prefill:
        def prefill(
            tokens: list[int], wanted: Wanted, writer: KVWriter, cancelled: Callable[[], bool]
        ) -> Logits:
            return inner.prefill(tokens, wanted, Swapped(writer) if len(tokens) == 5 else writer, cancelled)

        return prefill

    async with running_pair(*configs, with_engine(copies, shifted)) as pair:
        with pytest.raises(RemoteFailure, match="not the pattern"):
            await pair.ask([1, 2, 3, 4, 5], 2)
        assert (await pair.ask([1, 2, 3], 2)).token_ids == (4, 5)
    assert honest.describe().name == "replay"


class Swapped:
    """A writer that takes keys for values."""

    def __init__(self, inner: KVWriter) -> None:
        self._inner = inner

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Write them the wrong way round."""
        self._inner.write(layer_index, tokens, values, keys)
