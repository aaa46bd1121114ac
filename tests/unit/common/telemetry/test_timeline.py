"""When each stage of one request happened, and how long the stages took."""

import pytest

from common.telemetry.timeline import SpanRecord, Stages, Timeline


def make_timeline(*imports: tuple[int, int]) -> Timeline:
    """Return a finished timeline whose engine ended at 700, with spans imported in these times."""
    spans = [SpanRecord(number, 64, 1, 2, start, stop) for number, (start, stop) in enumerate(imports)]
    return Timeline(100, 130, 200, 700, 750, 757, 1000, spans)


def test_stages_are_differences_of_marks_and_sum_to_the_whole() -> None:
    """Nothing is counted twice and nothing left out."""
    stages = make_timeline().stages()

    assert stages == Stages(30, 70, 500, 50, 7, 243, 900)
    parts = (stages.queued, stages.waiting, stages.prefill, stages.exposed_transfer, stages.first_token)
    assert sum(parts) + stages.decode == stages.total


@pytest.mark.parametrize(
    ("imports", "overlap", "num_overlapped"),
    [
        ([], 0.0, 0),
        ([(300, 400), (500, 600)], 1.0, 2),
        ([(710, 740)], 0.0, 0),
        ([(600, 700)], 1.0, 1),
        ([(300, 400), (650, 750), (750, 950)], 0.375, 1),
    ],
    ids=["none", "hidden", "exposed", "to the end", "in part"],
)
def test_overlap_is_the_share_of_import_time_before_the_engine_s_end(
    imports: list[tuple[int, int]], overlap: float, num_overlapped: int
) -> None:
    """A span that is under way at the end counts in part, and as not overlapped."""
    timeline = make_timeline(*imports)

    assert timeline.overlap == overlap
    assert timeline.num_spans_overlapped == num_overlapped


def test_overlap_is_not_known_when_the_source_has_another_clock() -> None:
    """The engine's end is decode's guess then, and says nothing of what it hid."""
    timeline = make_timeline((300, 400), (650, 750))
    timeline.has_clock_error = True

    assert (timeline.overlap, timeline.num_spans_overlapped) == (0.0, 0)


def test_imports_that_took_no_time_have_no_overlap() -> None:
    """A clock that stood still is no division by zero."""
    assert make_timeline((300, 300)).overlap == 0.0
