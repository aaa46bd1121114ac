"""Each target is held against the median of ratios taken inside rounds."""

from __future__ import annotations

import pytest

from kvspan.bench.records import IdleSample, Sample
from kvspan.bench.verdicts import Verdict, verdicts
from tests.support.bench_samples import decode, make_run, transfer


def verdict(name: str, *samples: Sample) -> Verdict:
    """Return the one verdict of this name."""
    (found,) = [each for each in verdicts(make_run(*samples)) if each.name == name]
    return found


def test_first_token_of_stream_is_held_against_local() -> None:
    """Medians of per-round ratios: 1.0, 1.04 and 3.0 make 1.04, which is met."""
    samples = [
        transfer(arm, index, ttft_s=ttft_s)
        for index, (ours, local) in enumerate(((2.0, 2.0), (1.04, 1.0), (9.0, 3.0)))
        for arm, ttft_s in (("stream", ours), ("local", local))
    ]

    found = verdict("TTFT, stream / local, at 512 tokens", *samples)

    assert found.measured.median == pytest.approx(1.04)
    assert (found.measured.low, found.measured.high) == (1.0, 3.0)
    assert found.is_met


def test_first_token_of_a_short_prompt_has_no_target() -> None:
    """Its ratio is shown and cannot be short."""
    samples = (transfer("stream", 0, 128, ttft_s=9.0), transfer("local", 0, 128, ttft_s=1.0))

    assert verdict("TTFT, stream / local, at 128 tokens", *samples).limit is None


@pytest.mark.parametrize(("exposed_s", "is_met"), [(0.019, True), (0.021, False)])
def test_exposed_transfer_is_a_fifth_of_whole_at_most(exposed_s: float, is_met: bool) -> None:
    """0.1 s exposed by whole allow 0.02 s."""
    samples = (
        transfer("stream", 0, 2048, exposed_s=exposed_s),
        transfer("whole", 0, 2048, exposed_s=0.1),
    )

    assert verdict("exposed transfer, stream / whole, at 2048 tokens", *samples).is_met is is_met


@pytest.mark.parametrize(
    ("tokens", "overlapped", "limit", "is_met"),
    [(1000, 16, 0.8, True), (1000, 15, 0.8, False), (2048, 15, 0.8, False), (999, 15, None, True)],
)
def test_streaming_hides_most_spans_of_a_long_prompt(
    tokens: int, overlapped: int, limit: float | None, is_met: bool
) -> None:
    """Of 20 spans 16 must have been imported before the source ended, in the median round."""
    samples = [
        transfer("stream", index, tokens, num_spans=20, num_spans_overlapped=count)
        for index, count in enumerate((0, overlapped, 20))
    ]

    found = verdict(f"spans before the source ended, stream, at {tokens} tokens", *samples)

    assert found.measured.median == overlapped / 20
    assert (found.limit, found.is_met) == (limit, is_met)


@pytest.mark.parametrize(("counts", "is_met"), [((0, 0, 0), True), ((0, 1, 0), False)])
def test_whole_hides_no_span_in_any_round(counts: tuple[int, ...], is_met: bool) -> None:
    """It tells nothing before the source ended, at any length: one span too early is a mistake, no chance."""
    samples = [transfer("whole", index, num_spans_overlapped=count) for index, count in enumerate(counts)]

    assert verdict("spans before the source ended, whole, at 512 tokens", *samples).is_met is is_met


def test_a_prompt_that_moved_no_span_has_no_share() -> None:
    """Nothing is divided by zero."""
    names = [each.name for each in verdicts(make_run(transfer("whole", num_spans=0)))]

    assert not [name for name in names if name.startswith("spans")]


def test_streaming_that_slows_the_engine_is_short() -> None:
    """Compute takes 6 % longer than beside a transfer that waits for the end."""
    samples = (transfer("stream", prefill_s=1.06), transfer("whole", prefill_s=1.0))

    assert not verdict("engine time, stream / whole, at 512 tokens", *samples).is_met


def test_control_is_shown_and_never_judged() -> None:
    """How far the same arm differs from itself bounds what any other ratio can say."""
    samples = (transfer("stream", prefill_s=2.0), transfer("stream_again", prefill_s=3.0))
    found = verdict("engine time, stream again / stream, at 512 tokens", *samples)

    assert found.measured.median == 1.5
    assert found.limit is None


@pytest.mark.parametrize(
    ("lanes", "step_s", "is_met"), [(16, 0.19, True), (16, 0.21, False), (4, 0.29, True), (4, 0.31, False)]
)
def test_decode_is_held_against_generate(lanes: int, step_s: float, is_met: bool) -> None:
    """Against steps of 0.3 s: half as fast again with 16 lanes, no slower with fewer."""
    samples = (decode("kvspan", lanes, step_s), decode("generate", lanes, 0.3))

    assert verdict(f"decode tokens/s, pair / generate, {lanes} lanes", *samples).is_met is is_met


def test_idle_pair_is_held_against_a_share_of_a_core() -> None:
    """0.15 s of CPU in 5 s are 0.03 cores."""
    assert not verdict("idle pair, cores used", IdleSample(0, 5.0, 0.1, 0.05)).is_met


def test_warm_up_is_not_judged() -> None:
    """Rounds below 0 are in the record and in no ratio."""
    samples = (transfer("stream", -1), transfer("local", -1), decode("kvspan", 4, 1.0, -1))

    assert list(verdicts(make_run(*samples))) == []
