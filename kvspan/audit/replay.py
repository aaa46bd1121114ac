"""Replays journals of any number of lives of both services and sums up what it found.

Theory of operation: entries come in the order of time; each goes to the life that its boot id names. A life
begins with `service.started` and ends with `service.stopped`, when nothing may be held (rule 9), or without a
word: then it was killed, which is reported and no breach, and what it held ended with it.

Rules 7 and 8 (every fault reaches its client, and no other request) cannot be seen in a journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.telemetry.journal import Event
from kvspan.audit.decode_life import DecodeLife
from kvspan.audit.entries import Entry, LifeEnded, merge_files
from kvspan.audit.findings import Finding, Findings, Place
from kvspan.audit.life import Life
from kvspan.audit.prefill_life import PrefillLife
from kvspan.audit.sealed import SealBook

ROLES: dict[str, type[DecodeLife] | type[PrefillLife]] = {"decode": DecodeLife, "prefill": PrefillLife}

COUNTED = {
    Event.RESERVATION_MADE: "reservations",
    Event.RESERVATION_PUBLISHED: "published",
    Event.TRANSFER_STARTED: "transfers",
    Event.TRANSFER_ABORTED: "aborted",
    Event.SPAN_SEALED: "spans sealed",
    Event.SPAN_IMPORTED: "spans imported",
    Event.SESSION_OPENED: "session ends opened",
}
"""What the report counts, by event."""


@dataclass(frozen=True, slots=True)
class EndedLife:
    """How one life of a service ended."""

    role: str
    boot: str
    last: Place
    """Its last line."""

    was_killed: bool
    """Its lines end without `service.stopped`; a process that still runs looks the same."""

    num_held: int
    """Sessions, slots, transfers and reservations it held in the end."""


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of an audit."""

    num_lines: int
    lives: tuple[EndedLife, ...]
    counts: dict[str, int]
    """Events of interest, by name."""

    findings: tuple[Finding, ...]
    breaches: dict[str, int]
    """By rule, those not kept in `findings` included."""

    @property
    def is_clean(self) -> bool:
        """Whether no rule was broken."""
        return not self.breaches


class Replay:
    """The state of all lives; holds what is live, and one line per life that is over."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._sealed = SealBook()
        self._lives: dict[str, Life] = {}
        self._ended: list[EndedLife] = []
        self._counts = dict.fromkeys(COUNTED.values(), 0)
        self._num_lines = 0
        self._strangers: set[str] = set()
        # Invariant: boot ids that were blamed for having no life; once each.

    def take(self, entry: Entry | LifeEnded) -> None:
        """Replay one entry."""
        if isinstance(entry, LifeEnded):
            self._end(entry.boot, entry.place, was_killed=True)
            return
        self._num_lines += 1
        if entry.event in COUNTED:
            self._counts[COUNTED[entry.event]] += 1
        if entry.event is Event.SERVICE_STARTED:
            self._begin(entry)
        elif entry.boot not in self._lives:
            self._blame_stranger(entry)
        elif entry.event is Event.SERVICE_STOPPED:
            self._lives[entry.boot].stop(entry)
            self._end(entry.boot, entry.place, was_killed=False)
        else:
            self._lives[entry.boot].take(entry)

    def report(self) -> Report:
        """Return the outcome; every entry was taken."""
        kept, breaches = self._findings.kept, self._findings.counts
        return Report(self._num_lines, tuple(self._ended), self._counts, kept, breaches)

    @property
    def num_live_records(self) -> int:
        """Lives and compared transfers that are held in memory now."""
        return len(self._lives) + len(self._sealed)

    def _begin(self, entry: Entry) -> None:
        try:
            kind = ROLES.get(entry.text("role"))
            if kind is None:
                raise ValueError(f"role must be one of {', '.join(ROLES)}, is {entry.text('role')}")
            if entry.boot in self._lives:
                raise ValueError(f"boot id {entry.boot} starts twice")
            self._lives[entry.boot] = kind(entry, self._findings, self._sealed)
        except ValueError as error:
            self._findings.add("FORMAT", entry.place, str(error))

    def _end(self, boot: str, place: Place, *, was_killed: bool) -> None:
        life = self._lives.pop(boot, None)
        if life is None:
            return
        self._ended.append(EndedLife(life.role, boot, place, was_killed, len(life.held())))
        self._sealed.drop_life(boot)

    def _blame_stranger(self, entry: Entry) -> None:
        if entry.boot not in self._strangers:
            self._strangers.add(entry.boot)
            self._findings.add("FORMAT", entry.place, f"boot id {entry.boot} has not started, or has stopped")


def audit(entries: Iterable[Entry | LifeEnded], findings: Findings, *, all_stopped: bool = False) -> Report:
    """Replay entries in order; with `all_stopped` a life that was killed is a breach of rule 9."""
    replay = Replay(findings)
    for entry in entries:
        replay.take(entry)
    report = replay.report()
    if not report.lives:
        findings.add("FORMAT", Place("-", 0), "no journal holds a life of a service")
    for life in report.lives if all_stopped else ():
        if life.was_killed:
            findings.add("R9", life.last, f"{life.role} {life.boot} ended without service.stopped")
    return replay.report()


def audit_files(paths: Iterable[Path], *, all_stopped: bool = False) -> Report:
    """Audit journals of one host together.

    Raises: `ConfigError` when a file cannot be read.
    """
    findings = Findings()
    return audit(merge_files(paths, findings), findings, all_stopped=all_stopped)
