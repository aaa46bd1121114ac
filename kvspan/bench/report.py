"""The tables that `bench quick` prints, made from the record of a run and nothing else.

A value is the median of its samples; two values behind it are the least and the greatest sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvspan.bench.arms import ARMS, DECODERS
from kvspan.bench.ratios import Ratio, ratios
from kvspan.bench.records import DecodeSample, Run, Sample, TransferSample
from kvspan.bench.summary import Spread, spread

MS = 1e3
MIB = 1 << 20

TRANSFER_HEADS = (
    "tokens", "arm", "TTFT ms", "", "wait", "engine", "exposed ms", "", "first", "rest", "overlap", "spans",
    "MiB",
)  # fmt: skip
"""wait: for lane, pages, slot and engine; first: publication to first token; rest: outside the service."""

DECODE_HEADS = ("lanes", "who", "context", "tokens/s", "", "step ms", "")
RATIO_HEADS = ("ratio", "median", "", "A/A", "")
"""A/A: the same arm against itself; a ratio inside that range may be chance."""


def report_lines(run: Run) -> Iterator[str]:
    """Yield the whole report, line by line."""
    counted = [sample for sample in run.samples if sample.round_index >= 0]
    yield from _header_lines(run, counted)
    yield from _section("Time to first token", TRANSFER_HEADS, _transfer_rows(counted))
    yield from _section("Decode", DECODE_HEADS, _decode_rows(counted))
    yield from _section("Ratios", RATIO_HEADS, map(_ratio_row, ratios(run)))


def _header_lines(run: Run, counted: Sequence[Sample]) -> Iterator[str]:
    environment, services, plan = run.header.environment, run.header.services, run.header.plan
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    yield f"{environment['cpu_model']}, {environment['num_cores']} cores; {versions}"
    yield f"load before the run {environment['load']}; {run.header.started_utc}"
    yield ", ".join(f"{name} {value}" for name, value in services.items())
    warmups = len(run.samples) - len(counted)
    yield f"{plan['repetitions']} rounds, {len(counted)} samples; {warmups} of warm-up recorded, not counted"


def _section(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table with aligned columns, or nothing when it has no row."""
    cells = list(rows)
    if not cells:
        return
    yield ""
    yield title
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for row in (heads, *cells):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _transfer_rows(samples: Sequence[Sample]) -> Iterator[Sequence[str]]:
    transfers = [sample for sample in samples if isinstance(sample, TransferSample)]
    for length in sorted({sample.prompt_tokens for sample in transfers}):
        for arm in ARMS:
            chosen = [s for s in transfers if s.prompt_tokens == length and s.arm == arm.name]
            if chosen:
                yield (str(length), arm.name, *_transfer_cells(chosen))


def _transfer_cells(samples: Sequence[TransferSample]) -> Iterator[str]:
    def ms(value: Callable[[TransferSample], float]) -> str:
        return _number(MS * spread(map(value, samples)).median)

    yield from _with_range([MS * sample.ttft_s for sample in samples])
    yield ms(lambda s: s.queued_s + s.waiting_s)
    yield ms(lambda s: s.prefill_s)
    yield from _with_range([MS * sample.exposed_s for sample in samples])
    yield ms(lambda s: s.first_token_s)
    yield ms(lambda s: s.outside_s)
    yield f"{spread(s.overlap for s in samples).median:.0%}"
    overlapped = spread(s.num_spans_overlapped for s in samples).median
    yield f"{overlapped:.0f}/{samples[0].num_spans}"
    yield _number(samples[0].num_bytes / MIB)


def _decode_rows(samples: Sequence[Sample]) -> Iterator[Sequence[str]]:
    decodes = [sample for sample in samples if isinstance(sample, DecodeSample)]
    for lanes in sorted({sample.lanes for sample in decodes}):
        for decoder in DECODERS:
            chosen = [s for s in decodes if s.lanes == lanes and s.decoder == decoder]
            if chosen:
                context = spread(s.context_tokens for s in chosen).median
                rates = [s.tokens_per_s for s in chosen]
                steps = [MS * step for s in chosen for step in s.step_s]
                yield (
                    str(lanes), decoder, f"{context:.0f}", *_with_range(rates), *_with_range(steps)
                )  # fmt: skip


def _ratio_row(ratio: Ratio) -> Sequence[str]:
    def cells(values: Spread) -> tuple[str, str]:
        return f"{values.median:.3f}", f"({values.low:.3f}..{values.high:.3f})"

    return (ratio.name, *cells(ratio.measured), *(cells(ratio.control) if ratio.control else ("", "")))


def _with_range(values: Sequence[float]) -> tuple[str, str]:
    of = spread(values)
    return _number(of.median), f"({_number(of.low)}..{_number(of.high)})"


def _number(value: float) -> str:
    """Return three digits that count."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
