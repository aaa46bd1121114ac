"""First token, stop and sampling (rows F): the answer begins with the handed-over logits and ends once."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.wire.failure import RemoteFailure
from tests.integration.conftest import LoadPair, shared_pair
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, gated_at_end
from tests.support.pair import MODES, Pair, make_configs, running_pair, wait_until

PROMPT = prompt_of(40)
LONG_PROMPT = prompt_of(200)
"""Four chunks."""

SAMPLED = {"temperature": 0.8, "seed": 11, "top_k": 40}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running DENSE pair."""
    configs = make_configs(tmp_path_factory.mktemp("pair"), checkpoints["DENSE"])
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


@pytest.fixture
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    """Return the ORACLE of DENSE."""
    return oracles("DENSE")


async def num_steps(pair: Pair) -> int:
    """Return the decode steps since start."""
    return (await pair.client.status()).num_steps


@pytest.mark.parametrize("route", ["remote", "local"])
async def test_f1_one_token_is_returned_without_a_decode_step(pair: Pair, oracle: Oracle, route: str) -> None:
    """F1: max_new_tokens=1 gives one token, reason length, and no step of the decode model."""
    before = await num_steps(pair)

    completion = await pair.ask(PROMPT, 1, route=route)

    assert completion.token_ids == oracle.generate(PROMPT, 1)
    assert completion.finish_reason == "length"
    assert await num_steps(pair) == before


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


async def test_f2_the_end_of_sequence_token_of_the_checkpoint_stops_unless_ignored(
    tmp_path: Path, oracle: Oracle, checkpoints: dict[str, str]
) -> None:
    """F2: the checkpoint's own end-of-sequence id as first token ends the answer; ignore_eos goes on."""
    (first,) = oracle.generate(PROMPT, 1)
    folder = copy_with_eos(Path(checkpoints["DENSE"]), tmp_path / "eos", first)
    async with running_pair(*make_configs(tmp_path, str(folder))) as pair:
        stopped = await pair.client.complete(token_ids=PROMPT, max_new_tokens=4)
        ignored = await pair.client.complete(token_ids=PROMPT, max_new_tokens=4, ignore_eos=True)

    assert (stopped.token_ids, stopped.finish_reason) == ((first,), "stop")
    assert (ignored.token_ids, ignored.finish_reason) == (oracle.generate(PROMPT, 4), "length")


async def test_f5_four_tokens_cost_three_steps(pair: Pair, oracle: Oracle) -> None:
    """F5: the first token comes from prefill's logits; decode computes the others and no more."""
    before = await num_steps(pair)

    completion = await pair.ask(PROMPT, 4)

    oracle.assert_greedy(PROMPT, completion)
    assert await num_steps(pair) - before == 3


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("sampling.prompt_logprobs", {"prompt_logprobs": 1}),
        ("sampling.grammar", {"grammar": 'root ::= "x"'}),
        ("sampling.n", {"n": 2}),
    ],
    ids=["f6-prompt-logprobs", "f8-grammar", "i5-two-answers"],
)
async def test_f6_f8_i5_what_is_not_served_is_refused_by_name(
    pair: Pair, field: str, options: dict[str, Any]
) -> None:
    """F6, F8, I5: prompt log-probabilities, grammars and n above 1 are refused, naming the field."""
    with pytest.raises(RemoteFailure) as caught:
        await pair.client.complete(token_ids=PROMPT, **options)

    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("route", ["remote", "local"])
async def test_f7_the_first_token_has_its_log_probabilities(pair: Pair, oracle: Oracle, route: str) -> None:
    """F7: position 0 reports the same five best tokens and log-probabilities as ORACLE."""
    completion = await pair.ask(PROMPT, 3, logprobs=5, route=route)

    values, tokens = oracle.logprobs(PROMPT)[0].topk(5)
    first = completion.logprobs[0]
    assert len(completion.logprobs) == 3
    assert [entry.token_id for entry in first.top] == tokens.tolist()
    assert [entry.logprob for entry in first.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert first.chosen == first.top[0]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
async def test_f9_usage_counts_the_tokens_that_were_sent(pair: Pair, max_new_tokens: int) -> None:
    """F9: generated_tokens is the number of tokens sent, the handed-over one included."""
    completion = await pair.ask(PROMPT, max_new_tokens)

    assert len(completion.token_ids) == completion.usage.generated_tokens == max_new_tokens
    assert completion.usage.prompt_tokens == len(PROMPT)


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


async def test_f11_a_repetition_penalty_reaches_the_first_token(pair: Pair, oracle: Oracle) -> None:
    """F11: a penalty that outweighs every margin keeps the greedy first token out when the prompt has it."""
    (greedy,) = oracle.generate(PROMPT, 1)
    prompt = [greedy, *PROMPT]
    expected = oracle.logprobs(prompt)[0]
    allowed = [token for token in range(len(expected)) if token not in set(prompt)]

    completion = await pair.ask(prompt, 1, repetition_penalty=1e6)

    assert completion.token_ids[0] in allowed
    assert math.isfinite(completion.logprobs[0].chosen.logprob)


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


def copy_with_eos(source: Path, target: Path, eos_id: int) -> Path:
    """Copy a checkpoint, with another end-of-sequence id in its generation config."""

    shutil.copytree(source, target)
    path = target / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "eos_token_id": [eos_id]}))
    return target
