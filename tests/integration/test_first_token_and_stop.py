"""First token, stop and sampling (rows F): the answer begins with the handed-over logits and ends once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LoadPair
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, gated_at_end
from tests.support.pair import MODES, Pair, make_configs, running_pair, wait_until

PROMPT = prompt_of(40)
LONG_PROMPT = prompt_of(200)
"""Four chunks."""

SAMPLED = {"temperature": 0.8, "seed": 11, "top_k": 40}


async def num_steps(pair: Pair) -> int:
    """Return the decode steps since start."""
    return (await pair.client.status()).num_steps


@pytest.mark.parametrize("mode", MODES)
async def test_f2_f3_a_first_token_that_stops_decodes_nothing(pair: Pair, oracle: Oracle, mode: Any) -> None:
    """F2, F3: a first token that ends the answer ends it at once, in every mode, without a step."""
    (first,) = oracle.generate(LONG_PROMPT, 1)
    before = await num_steps(pair)

    completion = await pair.client.complete(
        token_ids=LONG_PROMPT, max_new_tokens=16, stop_token_ids=[first], transfer=mode
    )

    assert completion.token_ids == (first,)
    assert (completion.finish_reason, completion.text) == ("stop", "")
    assert await num_steps(pair) == before
    pair.assert_idle()


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 3},
        SAMPLED,
        {**SAMPLED, "logprobs": 2},
        {**SAMPLED, "top_p": 0.7},
        {**SAMPLED, "min_p": 0.05},
        {"repetition_penalty": 1.7},
        {**SAMPLED, "repetition_penalty": 1.3, "stop": ["\x00"]},
    ],
    ids="+".join,
)
async def test_f11_the_first_token_obeys_every_option(pair: Pair, options: dict[str, Any]) -> None:
    """F11: with each option the first token from handed-over logits is the one a local prefill gives."""
    remote = await pair.ask(PROMPT, 6, route="remote", **options)
    local = await pair.ask(PROMPT, 6, route="local", **options)

    assert remote.token_ids == local.token_ids
    assert [p.chosen for p in remote.logprobs] == [p.chosen for p in local.logprobs]


@pytest.mark.parametrize("mode", MODES)
async def test_f12_no_token_is_sent_before_the_prefill_has_ended(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle, mode: str
) -> None:
    """F12: with every byte of KV written and sealed but no PrefillDone, the answer has not begun."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"]), Gate()
    async with running_pair(*configs, gated_at_end(load(*configs), gate)) as pair:
        asked = asyncio.create_task(pair.ask(LONG_PROMPT, 2, transfer=mode))
        await wait_until(lambda: gate.num_arrived == 1)
        status = await pair.client.status()

        assert (status.reservations.transferring, status.reservations.decoding) == (1, 0)
        assert not asked.done()

        gate.open()
        oracle.assert_greedy(LONG_PROMPT, await asked)


async def test_f13_text_and_its_token_ids_give_the_same_answer(pair: Pair) -> None:
    """F13: a text is turned into tokens once, at decode; prefill computes the ids it is given."""
    text = "The sea is a mirror."
    token_ids = [256, *text.encode()]

    from_text = await pair.client.complete(text, max_new_tokens=6)
    from_ids = await pair.client.complete(token_ids=token_ids, max_new_tokens=6)

    assert from_text.token_ids == from_ids.token_ids
    assert from_text.usage.prompt_tokens == len(token_ids)
