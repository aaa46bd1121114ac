"""When each stage of one request happened, and how long the stages took.

Theory of operation: all marks are CLOCK_MONOTONIC nanoseconds of one kernel, so marks of the prefill service
and of the decode service can be subtracted, once they were checked (`common/session/peer_times.py`). Stages
are differences of consecutive marks; they sum to the whole by construction.

    arrived   reserved   source_started   source_ended   published   first_token   last_token
       | queued  | waiting      | prefill      | exposed      | first        | decode     |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """The import of one span."""

    sequence: int
    num_bytes: int
    written_ns: int
    sealed_ns: int
    import_start_ns: int
    import_end_ns: int


@dataclass(frozen=True, slots=True)
class Stages:
    """Durations in nanoseconds; they sum to `total`."""

    queued: int
    """From arrival to holding pages, slot and lane."""

    waiting: int
    """From there to the engine's start."""

    prefill: int
    """From the engine's start to its end."""

    exposed_transfer: int
    """From the engine's end to publication: what nothing hid."""

    first_token: int
    """From publication to the first token."""

    decode: int
    """From the first token to the last."""

    total: int


@dataclass(slots=True)
class Timeline:
    """Marks of one request; set once each, on the event loop."""

    arrived_ns: int
    reserved_ns: int = 0
    source_started_ns: int = 0
    source_ended_ns: int = 0
    published_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    spans: list[SpanRecord] = field(default_factory=list)
    place: str = ""
    """Name of what computed the prompt."""

    engine: str = ""
    """Name of the engine that computed it."""

    numerics: str = ""
    """What decides the bits of that engine."""

    is_local: bool = False
    """Whether the prompt was computed in the decode process."""

    has_clock_error: bool = False
    """Whether times of the prefill service could not be true; the source's marks are decode's own then."""

    def stages(self) -> Stages:
        """Return the durations; only after the last token."""
        marks = (
            self.arrived_ns,
            self.reserved_ns,
            self.source_started_ns,
            self.source_ended_ns,
            self.published_ns,
            self.first_token_ns,
            self.last_token_ns,
        )
        queued, waiting, prefill, exposed, first, decode = (
            after - before for before, after in pairwise(marks)
        )
        return Stages(queued, waiting, prefill, exposed, first, decode, total=marks[-1] - marks[0])

    @property
    def num_spans_overlapped(self) -> int:
        """Spans imported before the engine ended; 0 when its end is not known."""
        if self.has_clock_error:
            return 0
        return sum(record.import_end_ns <= self.source_ended_ns for record in self.spans)

    @property
    def overlap(self) -> float:
        """Import time before the engine's end, as a share of all import time; 0 when not known."""
        if self.has_clock_error:
            return 0.0
        total = sum(record.import_end_ns - record.import_start_ns for record in self.spans)
        hidden = sum(
            max(0, min(record.import_end_ns, self.source_ended_ns) - record.import_start_ns)
            for record in self.spans
        )
        return hidden / total if total else 0.0
