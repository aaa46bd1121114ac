"""The raw record of a run: a header line, then one JSON line per sample, written as it is measured.

Theory of operation: nothing is averaged before it is written, and a run that is interrupted keeps what it
has. Reports are made from these files alone, so that another reader can come to another conclusion.
Seconds everywhere. `round_index` below 0 is warm-up.

Not here: what is done with the samples (`summary.py`, `report.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from common.errors import ConfigError

SCHEMA = 1
"""Raise the number whenever the meaning of a field changes."""


@dataclass(frozen=True, slots=True)
class Header:
    """Where and how a run was made."""

    schema: int
    command: str
    started_utc: str
    environment: dict[str, Any]
    """Machine, versions and load before the run."""

    plan: dict[str, Any]
    """Fields of the plan of the run."""

    services: dict[str, Any]
    """Settings of both services, and what the decode service says of itself."""


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One prompt by one arm: what the client saw, and the stages that the service reports."""

    round_index: int
    position: int
    """Place in its round."""

    arm: str
    prompt_tokens: int
    ttft_s: float
    """From the call of Generate to the first token, at the client."""

    queued_s: float
    waiting_s: float
    prefill_s: float
    """From the engine's start to its end."""

    exposed_s: float
    """From the engine's end to publication."""

    first_token_s: float
    overlap: float
    num_spans: int
    num_spans_overlapped: int
    num_bytes: int

    @property
    def outside_s(self) -> float:
        """Time the client saw and no stage covers: the call itself and its answer."""
        stages = self.queued_s + self.waiting_s + self.prefill_s + self.exposed_s + self.first_token_s
        return self.ttft_s - stages


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Some decode steps with all lanes active."""

    round_index: int
    decoder: str
    lanes: int
    context_tokens: float
    """Mean over the lanes when the first of these steps began."""

    num_tokens: int
    """Tokens of all lanes in these steps."""

    step_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Rate over all lanes."""
        return self.num_tokens / sum(self.step_s)


@dataclass(frozen=True, slots=True)
class IdleSample:
    """What both services cost while nobody asks them."""

    round_index: int
    seconds: float
    decode_cpu_s: float
    prefill_cpu_s: float

    @property
    def cores(self) -> float:
        """Cores that the pair keeps busy."""
        return (self.decode_cpu_s + self.prefill_cpu_s) / self.seconds


Sample = TransferSample | DecodeSample | IdleSample

KINDS: dict[str, type[Sample]] = {"transfer": TransferSample, "decode": DecodeSample, "idle": IdleSample}


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a record file holds."""

    header: Header
    samples: tuple[Sample, ...]


class RecordWriter:
    """Writes one record file; every line is on its way to the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, header: Header) -> None:
        """Write the header; once, first."""
        self._write("header", header)

    def write(self, sample: Sample) -> None:
        """Write one sample."""
        self._write(next(name for name, kind in KINDS.items() if isinstance(sample, kind)), sample)

    def _write(self, kind: str, record: Header | Sample) -> None:
        self._file.write(json.dumps({"kind": kind} | dataclasses.asdict(record)) + "\n")
        self._file.flush()


def read_run(path: Path) -> Run:
    """Return what a record file holds; raises ConfigError when it is none."""
    try:
        return _parse(path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError("FILE", path, f"is no record of a run: {error}") from error


def _parse(lines: Iterable[str]) -> Run:
    records = [json.loads(line) for line in lines]
    if not records or records[0].pop("kind") != "header":
        raise ValueError("the first line is no header")
    header = Header(**records[0])
    if header.schema != SCHEMA:
        raise ValueError(f"its schema is {header.schema}, this program reads {SCHEMA}")
    return Run(header, tuple(_sample(record) for record in records[1:]))


def _sample(record: dict[str, Any]) -> Sample:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    kind: Any = KINDS[fields.pop("kind")]
    sample: Sample = kind(**fields)
    return sample
