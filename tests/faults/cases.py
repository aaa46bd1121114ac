"""The matrix: which fault strikes at which points, in which modes, under which policies, with which models.

`ROWS` is the table; `expand` makes the cases. SHORT is a part of it that any change has to pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

LLAMA, GEMMA = ("tiny:llama",), ("tiny:gemma3",)
BOTH = LLAMA + GEMMA
STREAM, MODES = ("stream",), ("stream", "whole", "deferred")
FAIL, ALL_POLICIES = ("fail",), ("fail", "retry", "local")

AFTER_PUBLICATION = ("published", "decoding")
AFTER_DONE = ("importing", *AFTER_PUBLICATION)
"""Points at which nothing of the prefill service is needed any more."""

BETWEEN = ("between1", "between2", "between4", "between5", "between6", "between7")
"""With "between3" of MOVING all gaps between the spans of a victim of tiny:llama."""

MOVING = ("first", "between3", "sealed", "importing")
"""One point of each kind before publication."""

ACTIONS = {
    "engine raises": "raise",
    "engine out of memory": "oom",
    "engine thread exits": "exit",
    "bytes altered": "corrupt",
    "copy raises": "raise",
}
"""What the gate does at the point, for faults that are not done from outside."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault at one point."""

    fault: str
    point: str
    mode: str
    policy: str
    model: str

    def __str__(self) -> str:
        parts = (self.fault, self.point, self.mode, self.policy, self.model.removeprefix("tiny:"))
        return "-".join(part.replace(" ", "_") for part in parts)

    @property
    def action(self) -> str:
        """What is ordered at the gate in place of holding the victim; empty to hold."""
        return ACTIONS.get(self.fault, "")

    @property
    def is_of_a_process(self) -> bool:
        """Whether the victim is sent by a process of its own."""
        return self.fault == "client killed"

    @property
    def waits_for_done(self) -> bool:
        """Whether PrefillDone arrives while the imports are held."""
        return self.fault != "no credit"


@dataclass(frozen=True, slots=True)
class Row:
    """A fault, and everything it is combined with."""

    fault: str
    points: tuple[str, ...]
    modes: tuple[str, ...] = STREAM
    policies: tuple[str, ...] = FAIL
    models: tuple[str, ...] = LLAMA


ROWS = (
    Row("prefill killed", ("idle", "before_welcome", "published", "decoding"), STREAM, ALL_POLICIES),
    Row("prefill killed", ("requested", *BETWEEN), MODES),
    Row("prefill killed", MOVING, MODES, ALL_POLICIES),
    Row("prefill killed", MOVING, MODES, FAIL, GEMMA),
    Row("prefill stopped", ("idle", "before_welcome", "decoding")),
    Row("prefill stopped", MOVING, MODES),
    Row("prefill stopped", MOVING, STREAM, ("retry", "local"), GEMMA),
    Row("prefill told to end", ("idle", *MOVING, "decoding")),
    Row("prefill told, too late", ("between3", "sealed")),
    Row("prefill told twice", ("idle", "between3", "decoding")),
    Row("one of two killed", ("idle", *MOVING, "decoding"), STREAM, ("fail", "retry")),
    Row("one of two stopped", ("first", "sealed"), STREAM, ("fail", "retry")),
    Row("one of two killed", ("queued",)),
    Row("one of two stopped", ("queued",)),
    Row("one of two told to end", ("queued", "between3")),
    Row("one of two is small", ("idle",)),
    Row("prefill is small", ("idle",)),
    Row("all killed", ("idle", "queued")),
    Row("decode killed", ("idle", "requested", *MOVING, "published", "decoding"), STREAM, FAIL, BOTH),
    Row("decode stopped", ("idle", *MOVING, "decoding")),
    Row("decode stopped shortly", ("first", "sealed"), MODES),
    Row("decode told to end", ("idle", *MOVING, "decoding")),
    Row("decode told, too late", ("between3", "importing")),
    Row("decode told twice", ("idle", "between3", "importing", "decoding")),
    Row("other weights", ("idle", "first")),
    Row("another engine", ("idle",)),
    Row("other chunks", ("idle",), STREAM, ("local",)),
    Row("other numbers", ("idle",)),
    Row("client cancels", ("queued", "requested", "published", "decoding"), STREAM, FAIL, BOTH),
    Row("client cancels", MOVING, MODES, FAIL, BOTH),
    Row("client's deadline", ("queued", "published", "decoding")),
    Row("client's deadline", MOVING, MODES),
    Row("client killed", ("queued", *MOVING, "published", "decoding")),
    Row("engine raises", ("layer0", "layer7", "first", "between3", "written", "sealed"), MODES),
    Row("engine raises", ("layer7", "sealed"), MODES, ("retry", "local")),
    Row("engine raises", ("layer7", "sealed"), MODES, FAIL, GEMMA),
    Row("engine out of memory", ("layer7", "between3"), STREAM, ALL_POLICIES),
    Row("engine thread exits", ("layer7", "sealed"), STREAM, ALL_POLICIES),
    Row("bytes altered", ("import0", "import4", "import7"), MODES),
    Row("bytes altered", ("import0", "import3"), MODES, FAIL, GEMMA),
    Row("copy raises", ("copy0", "copy4"), STREAM),
    Row("no credit", ("importing",), ("stream", "whole"), FAIL, BOTH),
    Row("prompt above slab", ("first",), ("stream", "whole")),
    Row("prompt above slab", ("idle",), ("deferred",)),
    Row("slab full", ("between3", "sealed")),
)

SHORT_ROWS = (
    Row("prefill killed", ("before_welcome", "first", "sealed", "importing", "decoding")),
    Row("prefill stopped", ("between3",)),
    Row("one of two killed", ("queued",)),
    Row("decode killed", ("between3",)),
    Row("prefill told to end", ("between3",)),
    Row("decode told to end", ("importing",)),
    Row("prefill told twice", ("between3",)),
    Row("decode told twice", ("decoding",)),
    Row("other weights", ("idle",)),
    Row("client cancels", ("between3", "decoding")),
    Row("client's deadline", ("first",)),
    Row("client killed", ("importing",)),
    Row("engine raises", ("layer7",)),
    Row("bytes altered", ("import4",), ("whole",)),
)


def expand(rows: tuple[Row, ...]) -> Iterator[Case]:
    """Yield the cases of rows, each once."""
    seen = set()
    for row in rows:
        for combined in product(row.points, row.modes, row.policies, row.models):
            case = Case(row.fault, *combined)
            if case not in seen:
                seen.add(case)
                yield case
