"""Samples and headers with distinct numbers, for the tests of records, ratios and reports."""

from __future__ import annotations

from dataclasses import replace

from kvspan.bench.records import SCHEMA, DecodeSample, Header, IdleSample, Run, Sample, TransferSample

TRANSFER = TransferSample(
    round_index=0,
    position=3,
    arm="stream",
    prompt_tokens=512,
    ttft_s=0.5,
    queued_s=0.01,
    waiting_s=0.02,
    prefill_s=0.4,
    exposed_s=0.03,
    first_token_s=0.025,
    overlap=0.75,
    num_spans=9,
    num_spans_overlapped=7,
    num_bytes=3 << 20,
)
DECODE = DecodeSample(
    round_index=0, decoder="kvspan", lanes=4, context_tokens=511.5, num_tokens=12, step_s=(0.1, 0.05, 0.15)
)
IDLE = IdleSample(round_index=0, seconds=5.0, decode_cpu_s=0.03, prefill_cpu_s=0.02)


def make_header() -> Header:
    """Return where a run was made."""
    return Header(
        schema=SCHEMA,
        command="quick",
        started_utc="2026-01-02T03:04:05+00:00",
        environment={
            "cpu_model": "Abacus 7",
            "cpu_flags": ["beads"],
            "num_cores": 3,
            "versions": {"kvspan": "9.8"},
            "load": [0.1, 0.2, 0.3],
        },
        plan={"repetitions": 2},
        services={"model": "demo", "threads": 1},
    )


def make_run(*samples: Sample) -> Run:
    """Return a run with these samples."""
    return Run(make_header(), samples)


def transfer(arm: str, round_index: int = 0, prompt_tokens: int = 512, **values: float) -> TransferSample:
    """Return a sample of one arm in one round, with some stages or counts of its own."""
    changed = replace(TRANSFER, arm=arm, round_index=round_index, prompt_tokens=prompt_tokens)
    return replace(changed, **values)  # type: ignore[arg-type]


def decode(decoder: str, lanes: int, step_s: float, round_index: int = 0) -> DecodeSample:
    """Return a sample of one step in which every lane made a token."""
    return DecodeSample(round_index, decoder, lanes, 512.0, lanes, (step_s,))
