"""What `bench quick` compares: ratios of arms that stood side by side in a round, and shares.

Theory of operation: a ratio is taken inside each round, so that what slowed the machine down cancels out. Its
control is the same arm against itself in the same rounds: what lies within the spread of the control may be
chance. Nothing is judged here: what a ratio should be depends on the machine and the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvspan.bench.arms import GENERATE, KVSPAN, LOCAL, STREAM, STREAM_AGAIN, WHOLE, Arm
from kvspan.bench.records import DecodeSample, IdleSample, Run, TransferSample
from kvspan.bench.summary import Spread, paired_ratios, spread


@dataclass(frozen=True, slots=True)
class Ratio:
    """One measured ratio or share."""

    name: str
    measured: Spread

    control: Spread | None = None
    """The first arm of the ratio against itself; None where no arm was run twice."""


def ratios(run: Run) -> Iterator[Ratio]:
    """Yield every ratio that the samples of a run allow."""
    transfers = [s for s in run.samples if isinstance(s, TransferSample) and s.round_index >= 0]
    for length in sorted({sample.prompt_tokens for sample in transfers}):
        yield from _transfer_ratios(length, [s for s in transfers if s.prompt_tokens == length])
    decodes = [s for s in run.samples if isinstance(s, DecodeSample) and s.round_index >= 0]
    for lanes in sorted({sample.lanes for sample in decodes}):
        yield from _decode_ratios(lanes, [s for s in decodes if s.lanes == lanes])
    idle = [s.cores for s in run.samples if isinstance(s, IdleSample) and s.round_index >= 0]
    if idle:
        yield Ratio("idle pair, cores used", spread(idle))


def _transfer_ratios(length: int, samples: list[TransferSample]) -> Iterator[Ratio]:
    def compare(above: Arm, below: Arm, value: Callable[[TransferSample], float]) -> Spread | None:
        theirs, ours = (
            {s.round_index: value(s) for s in samples if s.arm == arm.name} for arm in (below, above)
        )
        found = paired_ratios(ours, theirs)
        return spread(found) if found else None

    rows: tuple[tuple[str, Arm, Callable[[TransferSample], float]], ...] = (
        ("TTFT, stream / local", LOCAL, lambda sample: sample.ttft_s),
        ("TTFT, stream / whole", WHOLE, lambda sample: sample.ttft_s),
        ("exposed transfer, stream / whole", WHOLE, lambda sample: sample.exposed_s),
        ("engine time, stream / whole", WHOLE, lambda sample: sample.prefill_s),
    )
    for name, below, value in rows:
        measured = compare(STREAM, below, value)
        if measured is not None:
            yield Ratio(f"{name}, at {length} tokens", measured, compare(STREAM_AGAIN, STREAM, value))
    for arm in (STREAM, WHOLE):
        shares = [s.num_spans_overlapped / s.num_spans for s in samples if s.arm == arm.name and s.num_spans]
        if shares:
            yield Ratio(f"spans before the source ended, {arm.name}, at {length} tokens", spread(shares))


def _decode_ratios(lanes: int, samples: list[DecodeSample]) -> Iterator[Ratio]:
    ours, theirs = (
        {s.round_index: s.tokens_per_s for s in samples if s.decoder == name} for name in (KVSPAN, GENERATE)
    )
    found = paired_ratios(ours, theirs)
    if found:
        unit = "lane" if lanes == 1 else "lanes"
        yield Ratio(f"decode tokens/s, pair / generate, {lanes} {unit}", spread(found))
