"""Tests of what the audit says of decode's side: each row breaks one rule and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.telemetry.journal import Event
from tests.support.journals import DECODE, PREFILL, Change, Story, assert_named, make_story

E = Event


def drop(event: Event, **fields: Any) -> Change:
    """Return a change that leaves a step of decode out."""
    return lambda story: story.remove(event, **fields)


def repeat(event: Event, **fields: Any) -> Change:
    """Return a change that does a step of decode twice."""
    return lambda story: story.repeat(story.index(event, **fields))


def change(event: Event, where: dict[str, Any], **fields: Any) -> Change:
    """Return a change of fields of a step of decode."""
    return lambda story: story.change(story.index(event, **where), **fields)


def early(event: Event, before: Event, where: dict[str, Any]) -> Change:
    """Return a change that lets a step of transfer 2 happen before another one of it."""

    def move(story: Story) -> None:
        story.move(story.index(event, **where), story.index(before, **where))

    return move


def no_release_of_a_span(story: Story) -> None:
    """Let span 1 be sealed and imported over the bytes of span 0, which decode holds."""
    story.remove(E.SPAN_RELEASED, sequence=0)
    for side, event in ((PREFILL, E.SPAN_SEALED), (DECODE, E.SPAN_SUBMITTED)):
        story.change(story.index(event, side, transfer=1, sequence=1), offset=4096)


def slot_freed_during_transfer(story: Story) -> None:
    """Free the slot of transfer 2, and lease it again, before it has drained."""
    story.move(story.index(E.SLOT_FREED, generation=2), story.index(E.TRANSFER_DRAINED, transfer=2))


def retry_before_drain(story: Story) -> None:
    """Compute the prompt of transfer 2 in this process while its producer may still write."""
    fields = {"peer": "", "reservation": 2}
    at = story.index(E.TRANSFER_ABORTED)
    story.add(DECODE, E.LOCAL_STARTED, **fields, required=[[0, 5], [2, 5]])
    story.add(DECODE, E.LOCAL_ENDED, **fields, outcome="done", missing=0)
    story.move(len(story.steps) - 1, at + 1)
    story.move(len(story.steps) - 1, at + 1)


def aborted_after_publication(story: Story) -> None:
    """Abort transfer 1 when it has been published and has not drained."""
    at = story.index(E.TRANSFER_DRAINED, transfer=1)
    story.repeat(story.index(E.TRANSFER_ABORTED), at)
    story.change(at, transfer=1)


def published_after_failure(story: Story) -> None:
    """Publish transfer 1 although its producer failed."""
    story.change(story.index(E.PRODUCER_ENDED, transfer=1), verdict="failed")
    story.change(story.index(E.TRANSFER_ANSWERED, PREFILL, transfer=1), verdict="failed")


def published_without_prefill(story: Story) -> None:
    """Publish reservation 3, for which no engine ever ran."""
    story.remove(E.LOCAL_ENDED)
    story.remove(E.LOCAL_STARTED)


def slot_of_an_old_generation(story: Story) -> None:
    """Lease the slot of transfer 2 in the generation of transfer 1."""
    for index, step in enumerate(story.steps):
        if step.fields.get("generation") == 2:
            story.change(index, generation=1)


def drained_while_the_producer_writes(story: Story) -> None:
    """Let prefill's engine end only when its session has closed; decode believes another word."""
    story.remove(E.TRANSFER_ANSWERED, PREFILL, transfer=2)
    late = story.index(E.SLAB_UNMAPPED, PREFILL)
    story.move(story.index(E.TRANSFER_DRAINED, PREFILL, transfer=2), late)


TRANSFER_1 = {"transfer": 1}
TRANSFER_2 = {"transfer": 2}
RULES: dict[str, tuple[Change, str, str]] = {
    "R1 pages of another reservation": (
        change(E.RESERVATION_MADE, {"reservation": 2}, pages=[[[2, 5]], [[6, 8]]]),
        "R1",
        "pages [2, 5) of group 0 are held by reservation 1",
    ),
    "R1 pages the cache does not have": (
        change(E.RESERVATION_MADE, {"reservation": 3}, pages=[[[3, 5]], [[29, 31]]]),
        "R1",
        "group 1 has no pages [29, 31)",
    ),
    "R1 transfer without reservation": (drop(E.RESERVATION_MADE, reservation=2), "R1", "is not held"),
    "R1 transfer without slot": (drop(E.SLOT_LEASED, generation=1), "R1", "is not leased"),
    "R1 slot outside the slab": (
        change(E.SESSION_OPENED, {}, data=[4096, 8000]),
        "R1",
        "outside the slab's [4096, 8000)",
    ),
    "R1 slot leased twice": (
        lambda story: story.repeat(story.index(E.SLOT_LEASED, generation=2)),
        "R1",
        "slot 0 is leased already",
    ),
    "R1 other pages than reserved": (
        change(E.TRANSFER_STARTED, TRANSFER_2, pages=[[[3, 6]], [[7, 9]]]),
        "R1",
        "not those of its reservation",
    ),
    "R1 second writer of the same pages": (retry_before_drain, "R1", "pages have another writer"),
    "R2 published twice": (repeat(E.RESERVATION_PUBLISHED, reservation=1), "R2", "was published before"),
    "R2 published without Done": (
        change(E.PRODUCER_ENDED, TRANSFER_1, generation=8),
        "R2",
        "the producer's end was not seen",
    ),
    "R2 published after failure": (
        published_after_failure,
        "R2",
        "the producer's end was failed",
    ),
    "R2 published during an import": (
        lambda story: story.move(
            story.index(E.SPAN_IMPORTED, transfer=1, sequence=2), story.index(E.TRANSFER_DRAINED, transfer=1)
        ),
        "R2",
        "1 imports were under way",
    ),
    "R2 published before completion": (drop(E.TRANSFER_COMPLETED), "R2", "it was not complete"),
    "R2 published with a gap": (
        change(E.TRANSFER_STARTED, TRANSFER_1, required=[[0, 6], [2, 5]]),
        "R2",
        "group 0 layer 0 tokens [5, 6) and 1 more were not imported",
    ),
    "R2 published with other totals": (
        change(E.PRODUCER_ENDED, TRANSFER_1, totals=[[3, 256], [1, 64]]),
        "R2",
        "((3, 256), (1, 64)) sealed, ((2, 256), (1, 64)) imported",
    ),
    "R2 local engine failed": (
        change(E.LOCAL_ENDED, {}, outcome="EngineFailed"),
        "R2",
        "its prefill is EngineFailed",
    ),
    "R2 local engine left out a layer": (change(E.LOCAL_ENDED, {}, missing=7), "R2", "left out 7"),
    "R2 no prefill": (
        published_without_prefill,
        "R2",
        "its prefill is none",
    ),
    "R3 never sealed": (
        lambda story: story.remove(E.SPAN_SEALED, PREFILL, transfer=1, sequence=1),
        "R3",
        "never sealed it",
    ),
    "R3 imported before it was sealed": (
        lambda story: story.move(
            story.index(E.SPAN_SUBMITTED, transfer=2), story.index(E.SPAN_SEALED, PREFILL, transfer=2)
        ),
        "R3",
        "never sealed it",
    ),
    "R3 another digest than told": (
        change(E.SPAN_SUBMITTED, {"transfer": 1, "sequence": 2}, digest="bad"),
        "R3",
        "was sealed as",
    ),
    "R3 span ends twice": (repeat(E.SPAN_IMPORTED, transfer=1, sequence=0), "R3", "which is not under way"),
    "R3 other layers than the peer owns (W12)": (
        change(E.SESSION_OPENED, {}, layers=[2, 2]),
        "R3",
        "the peer owns 4 layers, this side 3",
    ),
    "R3 session with another life": (change(E.TRANSFER_ABORTED, {}, peer="ffff"), "R3", "not with ffff"),
    "R4 slot reused before drain": (slot_freed_during_transfer, "R4", "transfer 2 has not drained"),
    "R4 slot of an old generation": (
        slot_of_an_old_generation,
        "R4",
        "slot 0 is leased again as generation 1",
    ),
    "R4 slot freed twice": (repeat(E.SLOT_FREED, generation=1), "R4", "freed and was not leased"),
    "R4 drained while the producer may write": (
        drop(E.PRODUCER_ENDED, transfer=2),
        "R4",
        "drains before its producer has ended",
    ),
    "R4 drained on a word the producer did not give": (
        drained_while_the_producer_writes,
        "R4",
        "drains here while its producer still writes",
    ),
    "R4 drained during an import": (
        early(E.TRANSFER_DRAINED, E.SPAN_IMPORTED, TRANSFER_2),
        "R4",
        "drains during 1 imports",
    ),
    "R4 pages freed before drain": (
        lambda story: story.move(
            story.index(E.RESERVATION_FREED, reservation=2), story.index(E.TRANSFER_DRAINED, transfer=2)
        ),
        "R4",
        "pages are freed and transfer 2 has not drained",
    ),
    "R4 slab unmapped in an open session": (
        lambda story: story.move(story.index(E.SESSION_CLOSED), story.index(E.SLAB_UNMAPPED) + 1),
        "R4",
        "the slab is unmapped while its session is open",
    ),
    "R5 bytes used again before release": (no_release_of_a_span, "R5", "of span 0, which is not released"),
    "R5 span released twice": (repeat(E.SPAN_RELEASED, transfer=1, sequence=0), "R5", "which holds no bytes"),
    "R5 released during its import": (
        early(E.SPAN_RELEASED, E.SPAN_IMPORTED, {"transfer": 1, "sequence": 1}),
        "R5",
        "is released while it is imported",
    ),
    "R6 aborted after publication": (
        aborted_after_publication,
        "R6",
        "aborted after it was published",
    ),
    "R6 aborted twice": (repeat(E.TRANSFER_ABORTED), "R6", "aborted after it was aborted"),
    "R6 complete twice": (repeat(E.TRANSFER_COMPLETED), "R6", "completes after it was complete"),
    "R6 drained without an outcome": (drop(E.TRANSFER_ABORTED), "R6", "drains without an outcome"),
    "R6 drained twice": (repeat(E.TRANSFER_DRAINED, **TRANSFER_2), "R6", "has drained"),
    "R6 ends disagree": (
        change(E.PRODUCER_ENDED, TRANSFER_2, verdict="failed"),
        "R6",
        "failed here and cancelled there",
    ),
    "R6 session closed twice": (repeat(E.SESSION_CLOSED), "R6", "closed before"),
    "R9 reservation kept": (drop(E.RESERVATION_FREED, reservation=3), "R9", "pages of reservation 3"),
    "R9 slab kept": (drop(E.SLAB_UNMAPPED), "R9", "the slab of session kvspan-7.slab"),
}


def test_story_breaks_no_rule(tmp_path: Path) -> None:
    """The story that each row changes is in order."""
    report = make_story().audit(tmp_path)

    assert report.is_clean, report.findings
    assert report.counts["published"] == 2


@pytest.mark.parametrize("row", RULES)
def test_breach_is_named(row: str, tmp_path: Path) -> None:
    """Whatever breaks a rule is found under its name, at the line that shows it."""
    breaking, rule, words = RULES[row]
    story = make_story()
    breaking(story)

    first = story.audit(tmp_path).findings[0]

    assert first.rule == rule
    assert words in first.problem
    assert first.place.file.endswith("decode.jsonl")


def test_session_that_closes_ends_the_wait_for_its_producer(tmp_path: Path) -> None:
    """The slab of a lost producer is abandoned, so its transfers drain without its word."""
    story = make_story()
    story.remove(E.PRODUCER_ENDED, transfer=2)
    story.move(story.index(E.SESSION_CLOSED), story.index(E.TRANSFER_ABORTED))

    report = story.audit(tmp_path)

    assert report.is_clean, report.findings


def test_terminal_message_of_another_attempt_is_no_end(tmp_path: Path) -> None:
    """Only the producer's word on this attempt and lease ends it; another is passed over."""
    story = make_story()
    stray = story.index(E.PRODUCER_ENDED, transfer=2)
    story.repeat(stray)
    story.change(stray, attempt=7)

    report = story.audit(tmp_path)

    assert report.is_clean, report.findings


def test_second_end_of_a_producer_means_nothing(tmp_path: Path) -> None:
    """Rule 6: the first end stands, and what contradicts it later is no breach of this side."""
    story = make_story()
    done = story.index(E.PRODUCER_ENDED, transfer=1)
    story.repeat(done)
    story.change(done + 1, verdict="failed")

    report = story.audit(tmp_path)

    assert report.is_clean, report.findings


def test_transfer_with_its_end_outlives_its_session(tmp_path: Path) -> None:
    """Once the producer is done only the slab is needed, and that is unmapped after the publication."""
    story = make_story()
    names = ("transfer", "reservation", "generation")
    story.steps = [step for step in story.steps if 2 not in map(step.fields.get, names)]
    story.move(story.index(E.SESSION_CLOSED), story.index(E.SPAN_IMPORTED, transfer=1, sequence=2))

    report = story.audit(tmp_path)

    assert report.is_clean, report.findings


def test_line_without_a_field_is_named(tmp_path: Path) -> None:
    """A line that does not say what its event must say is a breach of its own."""
    story = make_story()
    story.change(story.index(E.LOCAL_ENDED), missing="none")

    assert_named(story.audit(tmp_path), "FORMAT", "missing must be a whole number, is 'none'")
