"""Times of a producer are believed while they can be true, and replaced by decode's own when they cannot."""

from dataclasses import replace

import pytest

from common.kv.spans import Span
from common.session.messages import SourceTimings
from common.session.peer_times import PeerTimes
from tests.support.sessions import SPANS

HOUR_NS = 3600 * 10**9
ASKED_NS, HEARD_NS, ENDED_NS = 1_000, 1_900, 5_000
"""When decode asked, heard a span, and heard Done."""

RIGHT = (1_100, 1_200, 4_000)
"""Accepted, started and ended."""


def make_span(written_ns: int, sealed_ns: int) -> Span:
    """Return a span with these times."""
    return replace(SPANS[0], written_ns=written_ns, sealed_ns=sealed_ns)


def engine_ns(times: PeerTimes, told: tuple[int, int, int], now_ns: int = ENDED_NS) -> tuple[int, int]:
    """Return when the engine counts as running, once these times were told."""
    times.done_received(SourceTimings(*told), now_ns)
    return times.engine_ns


@pytest.mark.parametrize("offset_ns", [0, 1 - ASKED_NS, HOUR_NS])
@pytest.mark.parametrize("told", [RIGHT, (1_000, 1_000, 1_000), (5_000, 5_000, 5_000)])
def test_times_between_question_and_answer_are_believed(told: tuple[int, int, int], offset_ns: int) -> None:
    """Edges count as between; a clock near zero, of a machine that has just started, is as good as any."""
    times = PeerTimes(ASKED_NS + offset_ns)
    shifted = (told[0] + offset_ns, told[1] + offset_ns, told[2] + offset_ns)

    assert engine_ns(times, shifted, ENDED_NS + offset_ns) == shifted[1:]
    assert times.problem == ""


@pytest.mark.parametrize(
    "told",
    [
        tuple(moment + HOUR_NS for moment in RIGHT),
        tuple(moment - HOUR_NS for moment in RIGHT),
        (1_100, 4_000, 1_200),
        (1_200, 1_100, 4_000),
        (0, 0, 0),
        (0, 1_200, 4_000),
        (1_100, 1_200, 0),
        (-5, 1_200, 4_000),
        (999, 1_200, 4_000),
        (1_100, 1_200, 5_001),
        (2**63 - 1, 2**63 - 1, -(2**63)),
    ],
    ids=[
        "an hour ahead",
        "an hour behind",
        "swapped",
        "started before accepted",
        "nothing told",
        "no acceptance",
        "no end",
        "negative",
        "before it was asked",
        "after it was heard",
        "extreme",
    ],
)
def test_times_that_cannot_be_true_are_replaced_by_our_own(told: tuple[int, int, int]) -> None:
    """Y25: the engine counts as running from the question to the answer, as decode saw both."""
    times = PeerTimes(ASKED_NS)

    assert engine_ns(times, told) == (ASKED_NS, ENDED_NS)
    assert f"ended_ns={told[2]}" in times.problem
    assert f"asked at {ASKED_NS} and heard at {ENDED_NS}" in times.problem


def test_zero_is_no_time_although_the_clock_here_is_at_zero() -> None:
    """What was not told must not pass as told on a clock that starts at zero."""
    times = PeerTimes(0)

    assert engine_ns(times, (0, 0, 0), 7) == (0, 7)
    assert times.problem


@pytest.mark.parametrize(
    ("written_ns", "sealed_ns"),
    [(0, 0), (1_300, 0), (1_400, 1_300), (999, 1_300), (1_300, 1_901), (1_300 + HOUR_NS, 1_400 + HOUR_NS)],
)
def test_a_clock_that_is_wrong_in_one_span_is_believed_in_nothing(written_ns: int, sealed_ns: int) -> None:
    """The first times that cannot be true are kept for the log, whatever comes later."""
    times = PeerTimes(ASKED_NS)
    times.span_received(make_span(1_300, 1_300), HEARD_NS)
    assert times.problem == ""
    times.span_received(make_span(written_ns, sealed_ns), HEARD_NS)
    times.span_received(make_span(-1, -1), HEARD_NS)

    assert engine_ns(times, RIGHT) == (ASKED_NS, ENDED_NS)
    assert times.problem == (
        f"written_ns={written_ns}, sealed_ns={sealed_ns}, asked at {ASKED_NS} and heard at {HEARD_NS}"
    )


def test_a_second_done_changes_no_time() -> None:
    """The first accepted end stands, and so do its times."""
    times = PeerTimes(ASKED_NS)
    first = engine_ns(times, RIGHT)

    assert engine_ns(times, (0, 0, 0), ENDED_NS + 1) == first
    assert times.problem == ""
