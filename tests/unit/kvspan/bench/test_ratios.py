"""Ratios are medians of what stood side by side in a round, with the same arm against itself as control."""

from __future__ import annotations

import pytest

from kvspan.bench.ratios import Ratio, ratios
from kvspan.bench.records import IdleSample, Sample
from tests.support.bench_samples import decode, make_run, transfer


def ratio(name: str, *samples: Sample) -> Ratio:
    """Return the one ratio of this name."""
    (found,) = [each for each in ratios(make_run(*samples)) if each.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "below", "value"),
    [
        ("TTFT, stream / local", "local", "ttft_s"),
        ("TTFT, stream / whole", "whole", "ttft_s"),
        ("exposed transfer, stream / whole", "whole", "exposed_s"),
        ("engine time, stream / whole", "whole", "prefill_s"),
    ],
)
def test_ratio_is_taken_inside_each_round(name: str, below: str, value: str) -> None:
    """1.0, 1.04 and 3.0 make 1.04; the control is 1.5 in the one round that has it."""
    samples = [
        transfer(arm, index, **{value: seconds})  # type: ignore[arg-type]
        for index, (ours, theirs) in enumerate(((2.0, 2.0), (1.04, 1.0), (9.0, 3.0)))
        for arm, seconds in (("stream", ours), (below, theirs))
    ]

    again = transfer("stream_again", 0, **{value: 3.0})  # type: ignore[arg-type]
    found = ratio(f"{name}, at 512 tokens", *samples, again)

    assert found.measured.median == pytest.approx(1.04)
    assert (found.measured.low, found.measured.high) == (1.0, 3.0)
    assert found.control is not None
    assert (found.control.median, found.control.count) == (1.5, 1)


@pytest.mark.parametrize("arm", ["stream", "whole"])
def test_share_of_spans_before_the_source_ended_is_shown(arm: str) -> None:
    """Of 20 spans 15 in the median round."""
    samples = [
        transfer(arm, index, num_spans=20, num_spans_overlapped=count)
        for index, count in enumerate((0, 15, 20))
    ]

    assert ratio(f"spans before the source ended, {arm}, at 512 tokens", *samples).measured.median == 0.75


def test_a_prompt_that_moved_no_span_has_no_share() -> None:
    """Nothing is divided by zero."""
    names = [each.name for each in ratios(make_run(transfer("whole", num_spans=0)))]

    assert not [name for name in names if name.startswith("spans")]


def test_decode_is_compared_with_generate() -> None:
    """Steps of 0.2 s against 0.3 s."""
    found = ratio(
        "decode tokens/s, pair / generate, 16 lanes", decode("kvspan", 16, 0.2), decode("generate", 16, 0.3)
    )

    assert found.measured.median == pytest.approx(1.5)
    assert found.control is None


def test_idle_pair_is_shown_as_cores() -> None:
    """0.15 s of CPU in 5 s are 0.03 cores."""
    assert ratio("idle pair, cores used", IdleSample(0, 5.0, 0.1, 0.05)).measured.median == pytest.approx(
        0.03
    )


def test_warm_up_is_in_no_ratio() -> None:
    """Rounds below 0 are in the record alone."""
    samples = (transfer("stream", -1), transfer("local", -1), decode("kvspan", 4, 1.0, -1))

    assert list(ratios(make_run(*samples))) == []
