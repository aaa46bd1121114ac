"""Tests of the audit over lives: how they end, what is counted, and how much is held in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.telemetry.journal import Event
from kvspan.audit.entries import merge_files
from kvspan.audit.findings import Findings
from kvspan.audit.replay import Replay, audit_files
from tests.support.journals import DECODE, PREFILL, Step, Story, assert_named, make_story


def killed_in(event: Event, side: str, **fields: object) -> Story:
    """Return a story in which the process of one side ends with its step of this event."""
    story = make_story()
    last = story.index(event, side, **fields)
    story.steps = [step for index, step in enumerate(story.steps) if step.side != side or index <= last]
    return story


def test_lives_and_events_are_counted(tmp_path: Path) -> None:
    """The report says what was audited, so that nothing passes for something."""
    report = make_story().audit(tmp_path)

    assert report.num_lines == 54
    assert [(life.role, life.was_killed, life.num_held) for life in report.lives] == [
        ("decode", False, 0),
        ("prefill", False, 0),
    ]
    assert report.counts["transfers"] == 2
    assert report.counts["aborted"] == 1


def test_killed_decode_is_reported_and_no_breach(tmp_path: Path) -> None:
    """What a killed process held ends with it."""
    report = killed_in(Event.SPAN_SUBMITTED, DECODE, transfer=2).audit(tmp_path)

    assert report.is_clean, report.findings
    killed = next(life for life in report.lives if life.role == "decode")
    # Reservations 1 and 2, the slab, a slot and a transfer.
    assert (killed.was_killed, killed.num_held) == (True, 5)


def test_killed_prefill_is_reported_and_no_breach(tmp_path: Path) -> None:
    """A producer that is killed leaves decode to end the session alone."""
    story = killed_in(Event.SPAN_SEALED, PREFILL, transfer=2)
    story.remove(Event.PRODUCER_ENDED, transfer=2)
    story.move(story.index(Event.SESSION_CLOSED), story.index(Event.TRANSFER_ABORTED))

    report = story.audit(tmp_path)

    assert report.is_clean, report.findings
    assert [life.was_killed for life in report.lives] == [True, False]


def test_killed_life_is_a_breach_when_all_must_have_stopped(tmp_path: Path) -> None:
    """A run that ends in order leaves a last line on both sides."""
    paths = killed_in(Event.SLAB_UNMAPPED, PREFILL).write(tmp_path)

    assert_named(audit_files(paths, all_stopped=True), "R9", "ended without service.stopped")


def test_lives_of_one_file_are_told_apart(tmp_path: Path) -> None:
    """A service that is started again begins with nothing, whatever the life before it held."""
    killed_in(Event.RESERVATION_MADE, DECODE, reservation=2).write(tmp_path)
    paths = make_story(life="a", start_ns=1000).write(tmp_path)

    report = audit_files(paths)

    assert report.is_clean, report.findings
    assert sorted(life.was_killed for life in report.lives) == [False, False, False, True]


def test_line_of_a_life_that_never_began_is_named_once(tmp_path: Path) -> None:
    """Without its first line nothing of a life can be judged."""
    story = make_story()
    story.remove(Event.SERVICE_STARTED, PREFILL)

    report = story.audit(tmp_path)

    assert report.breaches == {"FORMAT": 1}
    assert "has not started" in report.findings[0].problem


def test_life_that_begins_twice_is_named(tmp_path: Path) -> None:
    """A boot id names one life."""
    story = make_story()
    story.repeat(story.index(Event.SERVICE_STARTED), at=2)
    story.steps[2] = replace(story.steps[2], side=PREFILL)
    story.boots[PREFILL] = story.boots[DECODE]

    problems = [finding.problem for finding in story.audit(tmp_path).findings]

    assert "boot id d0d0 starts twice" in problems


def test_event_of_the_other_side_is_named(tmp_path: Path) -> None:
    """A prefill service reserves no pages."""
    story = make_story()
    index = story.index(Event.RESERVATION_MADE, reservation=3)
    story.repeat(index)
    story.steps[index] = replace(story.steps[index], side=PREFILL)

    assert_named(story.audit(tmp_path), "FORMAT", "reservation.made is no event of prefill")


def test_nothing_does_not_pass(tmp_path: Path) -> None:
    """An empty journal proves nothing."""
    (tmp_path / "empty").touch()

    assert_named(audit_files([tmp_path / "empty"]), "FORMAT", "no journal holds a life")


def test_memory_is_bounded_by_what_is_live(tmp_path: Path) -> None:
    """A journal of any length is audited in the memory of its live transfers."""
    story = make_story()
    first = story.index(Event.SLOT_LEASED, generation=2)
    last = story.index(Event.RESERVATION_FREED, reservation=2)
    cycle = story.steps[first : last + 1]
    more = []
    for number in range(3, 53):
        fields = {"transfer": number, "generation": number, "reservation": number + 100}
        more += [_renamed(step, fields) for step in cycle]
    story.steps[last + 1 : last + 1] = more
    findings, highest = Findings(), 0
    replay = Replay(findings)

    for entry in merge_files(story.write(tmp_path), findings):
        replay.take(entry)
        highest = max(highest, replay.num_live_records)

    assert replay.report().is_clean, replay.report().findings
    assert replay.report().counts["transfers"] == 52
    # Two lives and one transfer.
    assert highest == 3


def _renamed(step: Step, fields: dict[str, int]) -> Step:
    """Return a step with other values in those of the fields that it has."""
    return replace(step, fields={name: fields.get(name, value) for name, value in step.fields.items()})
