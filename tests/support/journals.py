"""Journals for tests: a small valid story of a pair as steps that can be changed, and real files to damage.

Theory of operation: a `Story` lists what both services did, in order; step number n happens at time n. A test
changes steps and has the lines written anew, so that the chain holds and only the rule under test is broken.
Group 0 has two layers with rows of 6 bytes, group 1 one layer with rows of 10; transfer 1 is published,
transfer 2 is cancelled during its import, reservation 3 is computed in decode's own process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.telemetry.journal import Event, Journal
from kvspan.audit.findings import Finding
from kvspan.audit.replay import Report, audit_files

DECODE, PREFILL = "decode", "prefill"
BOOTS = {DECODE: "d0d0", PREFILL: "a1a1"}
SLAB = "kvspan-7.slab"
LAYERS, ROW_BYTES = [2, 1], [6, 10]


@dataclass(frozen=True, slots=True)
class Step:
    """One line that a service writes."""

    side: str
    event: Event
    fields: dict[str, Any]


@dataclass(slots=True)
class Story:
    """What both services did, in order."""

    steps: list[Step] = field(default_factory=list)
    boots: dict[str, str] = field(default_factory=lambda: dict(BOOTS))
    start_ns: int = 0

    def add(self, side: str, event: Event, **fields: Any) -> None:
        """Append a step outside any session."""
        self.steps.append(Step(side, event, {"peer": "", **fields}))

    def on_session(self, side: str, event: Event, **fields: Any) -> None:
        """Append a step of the session."""
        peer = self.boots[PREFILL if side == DECODE else DECODE]
        self.steps.append(Step(side, event, {"peer": peer, "session": SLAB, **fields}))

    def index(self, event: Event, side: str = DECODE, **fields: Any) -> int:
        """Return where the first step of this event stands that has these fields."""
        return next(
            index
            for index, step in enumerate(self.steps)
            if (step.side, step.event) == (side, event) and fields.items() <= step.fields.items()
        )

    def change(self, index: int, **fields: Any) -> None:
        """Change fields of a step."""
        step = self.steps[index]
        self.steps[index] = replace(step, fields={**step.fields, **fields})

    def remove(self, event: Event, side: str = DECODE, **fields: Any) -> None:
        """Leave a step out."""
        self.steps.pop(self.index(event, side, **fields))

    def move(self, index: int, before: int) -> None:
        """Let a step happen before the one that stands at `before` now."""
        step = self.steps.pop(index)
        self.steps.insert(before - (index < before), step)

    def repeat(self, index: int, at: int | None = None) -> None:
        """Let a step happen once more, right after itself or at another place."""
        self.steps.insert(index + 1 if at is None else at, self.steps[index])

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Append to the journals of decode and prefill."""
        now = self.start_ns
        paths = directory / "decode.jsonl", directory / "prefill.jsonl"
        with (
            Journal(paths[0], self.boots[DECODE], lambda: now) as decode,
            Journal(paths[1], self.boots[PREFILL], lambda: now) as prefill,
        ):
            for now, step in enumerate(self.steps, self.start_ns):  # noqa: B007 - the clock of both journals
                (decode if step.side == DECODE else prefill).record(step.event, step.fields)
        return paths

    def audit(self, directory: Path) -> Report:
        """Return what the audit of both journals finds."""
        return audit_files(self.write(directory))


Change = Callable[[Story], None]


def span(transfer: int, generation: int, sequence: int) -> dict[str, Any]:
    """Return the description of one of the three spans of a transfer."""
    group, layers, tokens, offset, length = [
        (0, [0, 2], [0, 4], 4096, 128),
        (0, [0, 2], [4, 5], 4224, 128),
        (1, [0, 1], [2, 5], 4352, 64),
    ][sequence]
    return {
        "transfer": transfer,
        "attempt": 1,
        "slot": 0,
        "generation": generation,
        "sequence": sequence,
        "group": group,
        "layers": layers,
        "tokens": tokens,
        "offset": offset,
        "length": length,
        "digest": f"{transfer}f{sequence}e",
    }


def make_story(life: str = "", start_ns: int = 0) -> Story:
    """Return a story in which no rule is broken; `life` seals its boot ids from those of another."""
    story = Story(boots={side: boot + life for side, boot in BOOTS.items()}, start_ns=start_ns)
    shape = {"layers": LAYERS, "row_bytes": ROW_BYTES}
    story.add(DECODE, Event.SERVICE_STARTED, role=DECODE, pages=[20, 30], **shape)
    story.add(PREFILL, Event.SERVICE_STARTED, role=PREFILL, **shape)
    story.on_session(PREFILL, Event.SESSION_OPENED, digest="xxh3-64", layers=LAYERS)
    story.on_session(DECODE, Event.SESSION_OPENED, digest="xxh3-64", layers=LAYERS, data=[4096, 65536])
    _published(story)
    _cancelled(story)
    _local(story)
    story.add(DECODE, Event.RESERVATION_FREED, reservation=1)
    for side in (DECODE, PREFILL):
        story.on_session(side, Event.SESSION_CLOSED)
        story.on_session(side, Event.SLAB_UNMAPPED)
        story.add(side, Event.SERVICE_STOPPED)
    return story


def _begin(story: Story, transfer: int, pages: Sequence[Any]) -> dict[str, Any]:
    """Reserve, start and accept a transfer; generation and number of the reservation equal its id."""
    slot = {"slot": 0, "generation": transfer, "extent": [4096, 8192]}
    name = {"transfer": transfer, "attempt": 1}
    story.on_session(DECODE, Event.SLOT_LEASED, **slot)
    story.add(DECODE, Event.RESERVATION_MADE, reservation=transfer, pages=pages)
    started = {**name, "reservation": transfer, **slot, "pages": pages, "required": [[0, 5], [2, 5]]}
    story.on_session(DECODE, Event.TRANSFER_STARTED, **started, mode="stream")
    story.on_session(PREFILL, Event.TRANSFER_ACCEPTED, **name, **slot, exported=[0, 5], mode="stream")
    return name


def _published(story: Story) -> None:
    name = _begin(story, 1, [[[0, 3]], [[4, 6], [8, 9]]])
    for sequence in range(3):
        story.on_session(PREFILL, Event.SPAN_SEALED, **span(1, 1, sequence))
        story.on_session(DECODE, Event.SPAN_SUBMITTED, **span(1, 1, sequence))
        if sequence < 2:
            story.on_session(DECODE, Event.SPAN_IMPORTED, **name, sequence=sequence)
            story.on_session(DECODE, Event.SPAN_RELEASED, **name, sequence=sequence)
            story.on_session(PREFILL, Event.SPAN_CREDITED, **name, sequence=sequence)
    story.on_session(PREFILL, Event.TRANSFER_DRAINED, **name)
    story.on_session(PREFILL, Event.TRANSFER_ANSWERED, **name, verdict="done")
    totals = [[2, 256], [1, 64]]
    story.on_session(DECODE, Event.PRODUCER_ENDED, **name, verdict="done", generation=1, totals=totals)
    story.on_session(DECODE, Event.SPAN_IMPORTED, **name, sequence=2)
    story.on_session(DECODE, Event.TRANSFER_COMPLETED, **name)
    story.on_session(DECODE, Event.RESERVATION_PUBLISHED, **name, reservation=1)
    story.on_session(DECODE, Event.TRANSFER_DRAINED, **name)
    story.on_session(DECODE, Event.SLOT_FREED, slot=0, generation=1)


def _cancelled(story: Story) -> None:
    name = _begin(story, 2, [[[3, 6]], [[6, 8]]])
    story.on_session(PREFILL, Event.SPAN_SEALED, **span(2, 2, 0))
    story.on_session(DECODE, Event.SPAN_SUBMITTED, **span(2, 2, 0))
    story.on_session(DECODE, Event.TRANSFER_ABORTED, **name, reason="REQUEST_CANCELLED")
    story.on_session(PREFILL, Event.TRANSFER_DRAINED, **name)
    story.on_session(PREFILL, Event.TRANSFER_ANSWERED, **name, verdict="cancelled")
    story.on_session(DECODE, Event.PRODUCER_ENDED, **name, verdict="cancelled")
    story.on_session(DECODE, Event.SPAN_IMPORTED, **name, sequence=0)
    story.on_session(DECODE, Event.TRANSFER_DRAINED, **name)
    story.on_session(DECODE, Event.SLOT_FREED, slot=0, generation=2)
    story.add(DECODE, Event.RESERVATION_FREED, reservation=2)


def _local(story: Story) -> None:
    story.add(DECODE, Event.RESERVATION_MADE, reservation=3, pages=[[[3, 5]], [[6, 8]]])
    story.add(DECODE, Event.LOCAL_STARTED, reservation=3, required=[[0, 5], [2, 5]])
    story.add(DECODE, Event.LOCAL_ENDED, reservation=3, outcome="done", missing=0)
    story.add(DECODE, Event.RESERVATION_PUBLISHED, reservation=3)
    story.add(DECODE, Event.RESERVATION_FREED, reservation=3)


def breaches(report: Report) -> set[str]:
    """Return the rules that were broken."""
    return set(report.breaches)


def assert_named(report: Report, rule: str, words: str) -> Finding:
    """Check that this rule alone was broken, as the first finding says in these words, and return that."""
    assert breaches(report) == {rule}, [str(finding) for finding in report.findings]
    first = report.findings[0]
    assert words in first.problem, first
    return first


def damaged(lines: Sequence[bytes], index: int) -> dict[str, list[bytes]]:
    """Return what may happen to one line of a journal, by name; the last line is not swapped."""
    line, before, after = lines[index], list(lines[:index]), list(lines[index + 1 :])
    middle = len(line) // 2
    altered = line[:middle] + (b"7" if line[middle : middle + 1] != b"7" else b"8") + line[middle + 1 :]
    damages = {
        "removed": [*before, *after],
        "doubled": [*before, line, line, *after],
        "altered": [*before, altered, *after],
    }
    if after:
        damages["swapped"] = [*before, after[0], line, *after[1:]]
    return damages
