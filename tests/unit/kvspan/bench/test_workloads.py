"""Prompts are real text, exact in length, and never begin alike."""

from __future__ import annotations

import pytest

from kvspan.bench.workloads import PromptSource, QuickPlan, real_text, smoke_plan


def test_prompts_are_consecutive_stretches_of_the_text() -> None:
    """Each prompt has exactly the length asked for and shares no token with another."""
    source = PromptSource(range(100, 200))

    assert source.take(3) == (100, 101, 102)
    assert source.take(5) == (103, 104, 105, 106, 107)


def test_text_is_used_again_with_other_beginnings_when_it_is_spent() -> None:
    """A prefix computed before never serves a later prompt."""
    source = PromptSource(range(6))

    assert [source.take(3) for _ in range(4)] == [(0, 1, 2), (3, 4, 5), (1, 2, 3), (4, 5, 0)]


def test_prompt_longer_than_the_text_is_refused() -> None:
    """A prompt is never padded or cut short in silence."""
    with pytest.raises(ValueError, match="text of 5 tokens gives no other prompt of 7"):
        PromptSource(range(5)).take(7)


def test_rounds_below_zero_are_the_warm_up() -> None:
    """Warm-up rounds come first and cannot be mistaken for others."""
    assert list(QuickPlan(repetitions=3, warmups=2).rounds) == [-2, -1, 0, 1, 2]


def test_cache_holds_all_lanes_with_their_answers() -> None:
    """No lane waits for pages: 3 lanes of 40 tokens and their room for an answer."""
    assert QuickPlan(prompts=(7,), lanes=(1, 3), context=40).cache_tokens == 3 * (40 + 1024)


def test_cache_holds_the_longest_prompt_twice() -> None:
    """A prompt whose predecessor is still being let go of is not kept waiting."""
    assert QuickPlan(prompts=(9000,), lanes=(1,), context=40).cache_tokens == 18002


def test_full_plan_has_enough_rounds_for_a_median() -> None:
    """A median of fewer than five samples is not reported by default; a smoke run takes one."""
    assert QuickPlan().repetitions >= 5
    assert smoke_plan().repetitions == 1


def test_text_is_enough_for_a_full_run() -> None:
    """Prose of this interpreter, without repeats within a run of common size."""
    text = real_text()

    assert len(text) > 300_000
    assert "statement" in text
