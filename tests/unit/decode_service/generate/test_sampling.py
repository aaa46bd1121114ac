"""Tests of `decode_service/generate/sampling.py`."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from common.engine.prefill import Logits
from common.errors import EngineFailed
from decode_service.generate.sampling import Sampler
from decode_service.request import SamplingParams

PROBABILITIES = (0.05, 0.4, 0.1, 0.25, 0.2)
"""Ids by probability: 1, 3, 4, 2, 0."""
LOGITS = np.log(np.array(PROBABILITIES, dtype=np.float32)) + np.float32(3)
DRAWS = 2000


def row(values: Sequence[float]) -> Logits:
    """Return logits of one position."""
    return np.array(values, dtype=np.float32)


def make_sampler(prompt: Sequence[int] = (), rng_seed: int = 1, **fields: Any) -> Sampler:
    """Return a sampler with these params; the seed is 11 unless told."""
    return Sampler(SamplingParams(**{"seed": 11, **fields}), prompt, random.Random(rng_seed))


def draw(sampler: Sampler, count: int = DRAWS) -> Counter[int]:
    """Count the tokens of `count` draws from the same logits."""
    return Counter(sampler.sample(LOGITS).token_id for _ in range(count))


def test_best_token_is_picked_when_temperature_is_zero() -> None:
    """Greedy ignores seed and filters."""
    sampler = make_sampler(temperature=0.0, top_k=3, top_p=0.5)

    assert draw(sampler, 20) == {1: 20}


@pytest.mark.parametrize(
    ("fields", "support"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.8}, {1, 3, 4}),
        ({"top_p": 0.9}, {1, 3, 4, 2}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 0.24}, {1, 3, 4, 2}),
        ({"min_p": 1.0}, {1}),
        # Of the two kept by top_k the first holds 0.4 / 0.65 = 0.615.
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"top_k": 2, "top_p": 0.62}, {1, 3}),
        ({"top_p": 0.8, "min_p": 0.6}, {1, 3}),
    ],
)
def test_only_tokens_that_the_filters_keep_are_drawn(fields: dict[str, Any], support: set[int]) -> None:
    """Each filter narrows what the one before left; all that is left is drawn at some time."""
    sampler = make_sampler(temperature=1.0, **fields)

    assert set(draw(sampler, 400)) == support


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kept", [(0, 1, 2, 3, 4), (1, 3, 4)])
def test_tokens_are_drawn_in_their_proportion(temperature: float, kept: tuple[int, ...]) -> None:
    """Frequencies follow p ** (1 / temperature) over what is kept; 4.5 sigma with a fixed seed."""
    weights = {token: PROBABILITIES[token] ** (1 / temperature) for token in kept}

    counts = draw(make_sampler(temperature=temperature, top_k=len(kept)))

    for token, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(counts[token] - DRAWS * share) < 4.5 * math.sqrt(DRAWS * share * (1 - share))


def test_filters_follow_the_temperature() -> None:
    """At temperature 2 the best token holds less, so the same top_p keeps more tokens."""
    assert set(draw(make_sampler(temperature=2.0, top_p=0.8), 400)) == {1, 3, 4, 2}


def test_same_seed_gives_the_same_tokens_in_any_company() -> None:
    """Draws of another sampler in between change nothing."""
    alone = make_sampler(temperature=1.0)
    expected = [alone.sample(LOGITS).token_id for _ in range(30)]
    mine, other = make_sampler(temperature=1.0), make_sampler(temperature=1.0, seed=12)

    tokens = []
    for _ in range(30):
        tokens.append(mine.sample(LOGITS).token_id)
        other.sample(LOGITS)

    assert tokens == expected
    assert expected != [make_sampler(temperature=1.0, seed=12).sample(LOGITS).token_id for _ in range(30)]


def test_seed_comes_from_the_argument_when_the_request_has_none() -> None:
    """Without a seed two requests differ, and the same source of randomness repeats them."""
    first, again, other = (
        [sampler.sample(LOGITS).token_id for _ in range(30)]
        for sampler in (make_sampler(rng_seed=rng, temperature=1.0, seed=None) for rng in (1, 1, 2))
    )

    assert first == again
    assert first != other


def test_seen_tokens_are_penalised_on_both_sides_of_zero() -> None:
    """Positive logits are divided, negative ones multiplied; prompt and output both count as seen."""
    logits = row([3.0, 2.9, -1.0, -1.2])

    from_prompt = make_sampler(prompt=[0], repetition_penalty=1.5)
    assert [from_prompt.sample(logits).token_id for _ in range(3)] == [1, 0, 0]
    negative = make_sampler(prompt=[0, 1, 2], repetition_penalty=100.0)
    assert negative.sample(row([-3.0, -3.0, -1.0, -1.2])).token_id == 3


def test_logprobs_are_those_of_the_model() -> None:
    """Neither penalty nor temperature changes the reported probabilities."""
    sampler = make_sampler(prompt=[1], temperature=5.0, top_k=1, repetition_penalty=2.0, logprobs=3)

    token = sampler.sample(LOGITS)

    assert token.logprob == pytest.approx(math.log(PROBABILITIES[token.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in token.top] == [1, 3, 4]
    assert [math.exp(value) for _, value in token.top] == pytest.approx([0.4, 0.25, 0.2], abs=1e-5)


def test_logits_are_left_as_they_are() -> None:
    """The caller's row may be part of a batch."""
    logits = LOGITS.copy()

    make_sampler(prompt=[0, 1], temperature=0.7, top_p=0.9, repetition_penalty=1.3).sample(logits)

    assert np.array_equal(logits, LOGITS)


def test_tiny_temperature_draws_the_best_token() -> None:
    """Scores are scaled relative to the best, so nothing overflows."""
    assert draw(make_sampler(temperature=1e-30), 20) == {1: 20}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sampling_fails_when_logits_are_not_finite(bad: float) -> None:
    """No token is made up out of a broken forward."""
    with pytest.raises(EngineFailed, match="not finite"):
        make_sampler().sample(row([1.0, bad, 2.0]))


def test_masked_logits_are_never_drawn() -> None:
    """Minus infinity is a probability of zero."""
    logits = row([0.0, -math.inf, 0.0])
    sampler = make_sampler(temperature=1.0)

    assert {sampler.sample(logits).token_id for _ in range(100)} == {0, 2}


def test_handed_over_logits_may_be_read_only() -> None:
    """Logits that came over the wire are bytes of a message."""
    array = np.frombuffer(row([1.0, 2.0]).tobytes(), np.float32)

    assert make_sampler(temperature=0.0).sample(array).token_id == 1
