"""What a check is: a name, the rule in one line, and a run that fails clearly."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

S = TypeVar("S")


class CheckFailed(AssertionError):
    """A rule does not hold; the text says for which prompt, what was expected, and what was found."""


class Skipped(Exception):
    """A rule that does not concern this subject; the text says why."""


@dataclass(frozen=True, slots=True)
class Check(Generic[S]):
    """One rule."""

    name: str
    rule: str
    run: Callable[[S], None]
    """Raises `CheckFailed` or `Skipped`; anything else that is raised is a failure too."""

    def __str__(self) -> str:
        return self.name


def fail(problem: str) -> NoReturn:
    """Raise `CheckFailed`."""
    raise CheckFailed(problem)


def require(holds: bool, problem: str) -> None:
    """Raise `CheckFailed` unless a rule holds."""
    if not holds:
        fail(problem)


def of_table(*checks: tuple[str, str, Callable[[S], None]]) -> tuple[Check[S], ...]:
    """Return checks from rows of name, rule and run."""
    return tuple(Check(*row) for row in checks)


def outcome_of(check: Check[S], subject: S) -> tuple[str, list[str]]:
    """Run one check and return its verdict, and what there is to say about it."""
    try:
        check.run(subject)
    except Skipped as reason:
        return "skip", [str(reason)]
    except CheckFailed as failure:
        return "FAILS", [str(failure)]
    except Exception as error:  # noqa: BLE001 - what an engine raises is what the check found
        return "FAILS", list(_where(error))
    return "ok", []


def _where(error: Exception) -> Iterator[str]:
    yield f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    yield f"in {last.name}, {last.filename}:{last.lineno}"
