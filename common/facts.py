"""What an error lists when it says all that is wrong, and not the first only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One field on which two peers disagree, with both values as text."""

    field: str
    decode_value: str
    prefill_value: str

    def __str__(self) -> str:
        return f"{self.field}: decode {self.decode_value}, prefill {self.prefill_value}"


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that is wrong, and what would be right."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"
