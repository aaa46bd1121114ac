"""What the replay of a life has in common on both sides: a table from event to check, and its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from common.kv.ranges import Range
from common.telemetry.journal import Event
from kvspan.audit.entries import Entry
from kvspan.audit.findings import Findings
from kvspan.audit.sealed import Descriptor, SealBook

Check = Callable[[Entry], None]


class Breach(Exception):
    """A line that breaks a rule and says nothing that could be replayed."""

    def __init__(self, rule: str, problem: str) -> None:
        self.rule = rule
        self.problem = problem
        super().__init__(f"{rule}: {problem}")


class Life:
    """One life of a service, from `service.started` on."""

    role = ""

    def __init__(self, boot: str, findings: Findings, sealed: SealBook) -> None:
        self.boot = boot
        self.sealed = sealed
        self._findings = findings
        self._checks: Mapping[Event, Check] = self.checks()

    def checks(self) -> Mapping[Event, Check]:
        """Return what to do for each event of this side."""
        raise NotImplementedError

    def held(self) -> tuple[str, ...]:
        """Return what is held now, as text (rule 9)."""
        raise NotImplementedError

    def take(self, entry: Entry) -> None:
        """Replay one line."""
        check = self._checks.get(entry.event)
        if check is None:
            self.blame("FORMAT", entry, f"{entry.event.value} is no event of {self.role}")
            return
        try:
            check(entry)
        except Breach as breach:
            self.blame(breach.rule, entry, breach.problem)
        except ValueError as error:
            self.blame("FORMAT", entry, str(error))

    def stop(self, entry: Entry) -> None:
        """The life ends in order: nothing may be held."""
        for held in self.held():
            self.blame("R9", entry, f"{self.role} stopped and still holds {held}")

    def blame(self, rule: str, entry: Entry, problem: str) -> None:
        """Note a breach."""
        self._findings.add(rule, entry.place, problem)

    def blame_all(self, entry: Entry, breaches: Iterable[tuple[str, str]]) -> None:
        """Note breaches, each a rule and its problem; makes the change that yields them."""
        for rule, problem in breaches:
            self.blame(rule, entry, problem)

    def expect(self, rule: str, entry: Entry, problem: str) -> None:
        """Note a breach unless `problem` is empty."""
        if problem:
            self.blame(rule, entry, problem)


def descriptor_of(entry: Entry) -> Descriptor:
    """Return the span that a line describes."""
    offset = entry.number("offset")
    return Descriptor(
        slot=entry.number("slot"),
        generation=entry.number("generation"),
        group=entry.number("group"),
        layers=entry.range("layers"),
        tokens=entry.range("tokens"),
        extent=Range(offset, offset + entry.number("length")),
        digest=entry.text("digest"),
    )
