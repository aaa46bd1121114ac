"""The report shows what the record holds, with its spread, and nothing of the warm-up."""

from __future__ import annotations

from kvspan.bench.report import report_lines
from tests.support.bench_samples import DECODE, IDLE, TRANSFER, make_run, transfer


def report(*samples: object) -> str:
    """Return the report of a run with these samples."""
    return "\n".join(report_lines(make_run(*samples)))  # type: ignore[arg-type]


def cells_of(text: str, *start: str) -> list[str]:
    """Return the cells of the one line that starts with `start`."""
    (line,) = [line.split() for line in text.splitlines() if line.split()[: len(start)] == list(start)]
    return line


def test_report_says_where_and_how_it_was_measured() -> None:
    """A number without its machine and settings is worth nothing."""
    text = report(TRANSFER)

    assert "Abacus 7, 3 cores; kvspan 9.8" in text
    assert "model demo, threads 1" in text


def test_first_token_is_shown_with_its_stages() -> None:
    """Milliseconds at the client with range, then wait, engine, exposed with range, first, rest."""
    line = cells_of(report(TRANSFER), "512", "stream")

    assert line[2:] == [
        "500", "(500..500)", "30.0", "400", "30.0", "(30.0..30.0)", "25.0", "15.0", "75%", "7/9", "3.00",
    ]  # fmt: skip


def test_value_is_the_median_between_the_extremes() -> None:
    """Three rounds of one arm."""
    samples = [transfer("local", index, ttft_s=ttft_s) for index, ttft_s in enumerate((0.2, 0.9, 0.3))]

    assert cells_of(report(*samples), "512", "local")[2:4] == ["300", "(200..900)"]


def test_decode_is_shown_as_rate_and_steps() -> None:
    """12 tokens in 0.3 s over steps of 50 to 150 ms."""
    line = cells_of(report(DECODE), "4", "kvspan")

    assert line[2:] == ["512", "40.0", "(40.0..40.0)", "100", "(50.0..150)"]


def test_ratio_is_shown_beside_its_control() -> None:
    """Median and range of the ratio, then of the same arm against itself; without one the place is empty."""
    text = report(
        IDLE,
        *(transfer(arm, ttft_s=s) for arm, s in (("stream", 0.5), ("local", 0.4), ("stream_again", 0.6))),
    )

    (ratio,) = [line.split() for line in text.splitlines() if "stream / local" in line]
    assert ratio[-4:] == ["1.250", "(1.250..1.250)", "1.200", "(1.200..1.200)"]
    assert text.endswith("0.010  (0.010..0.010)")


def test_warm_up_is_counted_and_not_shown() -> None:
    """It is in the record, for whoever wants to look."""
    text = report(TRANSFER, transfer("whole", -1), transfer("deferred", -1))

    assert "1 samples; 2 of warm-up recorded" in text
    assert "whole" not in text.replace("stream / whole", "")
