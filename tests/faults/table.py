"""What came of each case, and the table of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Verdict:
    """One case."""

    fault: str
    name: str
    outcome: str = ""
    """How the victim ended."""

    wrong: list[str] = field(default_factory=list)
    """Tokens that differ, a status that is not the right one, a rule that was broken."""

    leaked: list[str] = field(default_factory=list)
    """What is still held or left."""

    hung: list[str] = field(default_factory=list)
    """What did not end in time."""

    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the services recovered."""
        return not (self.wrong or self.leaked or self.hung)

    def text(self) -> str:
        """Return what was found, for people."""
        kinds = (("wrong", self.wrong), ("leaked", self.leaked), ("hung", self.hung))
        found = [f"{kind}: {one}" for kind, texts in kinds for one in texts]
        return "\n".join([f"{self.name} ended as {self.outcome}", *found])


COLUMNS = ("cases", "recovered", "leaked", "wrong", "hung", "seconds")


def table_lines(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield the table: a line for each fault, then the sum."""
    rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        for row in (rows[verdict.fault], rows["all"]):
            row["cases"] += 1
            row["recovered"] += verdict.is_good
            row["leaked"] += bool(verdict.leaked)
            row["wrong"] += bool(verdict.wrong)
            row["hung"] += bool(verdict.hung)
            row["seconds"] += verdict.seconds  # type: ignore[assignment]
        outcomes[verdict.fault][verdict.outcome] += 1
    total = rows.pop("all", Counter())
    yield f"{'fault':26}" + "".join(f"{name:>11}" for name in COLUMNS) + "  how the victim ended"
    for fault, counts in [*rows.items(), ("all", total)]:
        numbers = "".join(f"{counts[name]:>11.0f}" for name in COLUMNS)
        ends = ", ".join(f"{end} {count}" for end, count in outcomes[fault].most_common())
        yield f"{fault:26}{numbers}  {ends}"
