"""What the numbers of `bench quick` should be, and whether they are.

Theory of operation: a target holds for the median of a ratio, which is taken inside each round, or for every
sample where chance has no part in it. A target without samples has no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvspan.bench.arms import GENERATE, KVSPAN, LOCAL, STREAM, STREAM_AGAIN, WHOLE, Arm
from kvspan.bench.records import DecodeSample, IdleSample, Run, TransferSample
from kvspan.bench.summary import Spread, paired_ratios, spread

TTFT_LIMIT = 1.05
TTFT_PROMPTS = (512, 2048)
"""Prompt lengths for which the limit holds; shorter ones are shown."""

EXPOSED_LIMIT = 0.2
EXPOSED_PROMPTS = (2048,)
OVERLAP_FLOOR = 0.8
OVERLAP_FROM_TOKENS = 1000
"""Shortest prompt of which streaming must hide that share; a shorter one has few chunks before the last."""

SLOWDOWN_LIMIT = 1.05
DECODE_FLOORS = {16: 1.5}
"""By lanes; 1.0 for any other number."""

IDLE_LIMIT = 0.02
"""Cores of the pair."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One measured ratio and what it should be."""

    name: str
    measured: Spread
    limit: float | None
    """None for a ratio that is only shown."""

    is_ceiling: bool = True
    """Whether the limit is the most, or the least, that is right."""

    is_for_each: bool = False
    """Whether every sample, and not only the median, has to be right."""

    @property
    def is_met(self) -> bool:
        """Whether the values are on the right side of their limit; true without one."""
        if self.limit is None:
            return True
        judged, values = self.measured.median, self.measured
        if self.is_for_each:
            judged = values.high if self.is_ceiling else values.low
        return judged <= self.limit if self.is_ceiling else judged >= self.limit


def verdicts(run: Run) -> Iterator[Verdict]:
    """Yield every ratio that the samples of a run allow."""
    transfers = [s for s in run.samples if isinstance(s, TransferSample) and s.round_index >= 0]
    for length in sorted({sample.prompt_tokens for sample in transfers}):
        yield from _transfer_verdicts(length, [s for s in transfers if s.prompt_tokens == length])
    decodes = [s for s in run.samples if isinstance(s, DecodeSample) and s.round_index >= 0]
    for lanes in sorted({sample.lanes for sample in decodes}):
        yield from _decode_verdicts(lanes, [s for s in decodes if s.lanes == lanes])
    idle = [s.cores for s in run.samples if isinstance(s, IdleSample) and s.round_index >= 0]
    if idle:
        yield Verdict("idle pair, cores used", spread(idle), IDLE_LIMIT)


def _transfer_verdicts(length: int, samples: list[TransferSample]) -> Iterator[Verdict]:
    def compare(
        name: str, arms: tuple[Arm, Arm], value: Callable[[TransferSample], float]
    ) -> Iterator[Spread]:
        above, below = ({s.round_index: value(s) for s in samples if s.arm == arm.name} for arm in arms)
        ratios = paired_ratios(above, below)
        if ratios:
            yield spread(ratios)

    at = f"at {length} tokens"
    rows = (
        ("TTFT, stream / local", (STREAM, LOCAL), _ttft, TTFT_LIMIT if length in TTFT_PROMPTS else None),
        ("TTFT, stream / whole", (STREAM, WHOLE), _ttft, None),
        ("TTFT, stream again / stream", (STREAM_AGAIN, STREAM), _ttft, None),
        (
            "exposed transfer, stream / whole",
            (STREAM, WHOLE),
            _exposed,
            EXPOSED_LIMIT if length in EXPOSED_PROMPTS else None,
        ),
        ("engine time, stream / whole", (STREAM, WHOLE), _engine, SLOWDOWN_LIMIT),
        ("engine time, stream again / stream", (STREAM_AGAIN, STREAM), _engine, None),
    )
    for name, arms, value, limit in rows:
        for measured in compare(name, arms, value):
            yield Verdict(f"{name}, {at}", measured, limit)
    yield from _overlap_verdicts(length, samples)


def _overlap_verdicts(length: int, samples: list[TransferSample]) -> Iterator[Verdict]:
    """Yield which share of the spans was imported before the source ended: most of stream, none of whole."""
    for arm in (STREAM, WHOLE):
        shares = [s.num_spans_overlapped / s.num_spans for s in samples if s.arm == arm.name and s.num_spans]
        if not shares:
            continue
        name, measured = f"spans before the source ended, {arm.name}, at {length} tokens", spread(shares)
        if arm is WHOLE:
            yield Verdict(name, measured, 0.0, is_for_each=True)
        else:
            floor = OVERLAP_FLOOR if length >= OVERLAP_FROM_TOKENS else None
            yield Verdict(name, measured, floor, is_ceiling=False)


def _decode_verdicts(lanes: int, samples: list[DecodeSample]) -> Iterator[Verdict]:
    ours, theirs = (
        {s.round_index: s.tokens_per_s for s in samples if s.decoder == name} for name in (KVSPAN, GENERATE)
    )
    ratios = paired_ratios(ours, theirs)
    if ratios:
        name = f"decode tokens/s, pair / generate, {lanes} {'lane' if lanes == 1 else 'lanes'}"
        yield Verdict(name, spread(ratios), DECODE_FLOORS.get(lanes, 1.0), is_ceiling=False)


def _ttft(sample: TransferSample) -> float:
    return sample.ttft_s


def _exposed(sample: TransferSample) -> float:
    return sample.exposed_s


def _engine(sample: TransferSample) -> float:
    return sample.prefill_s
