"""Tests of what the audit says of prefill's side: each row breaks one rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.telemetry.journal import Event
from kvspan.audit.replay import audit_files
from tests.support.journals import DECODE, PREFILL, Change, Story, make_story

E = Event


def at(story: Story, event: Event, **fields: Any) -> int:
    """Return where a step of prefill stands."""
    return story.index(event, PREFILL, **fields)


def change(event: Event, where: dict[str, Any], **fields: Any) -> Change:
    """Return a change of fields of a step of prefill."""
    return lambda story: story.change(at(story, event, **where), **fields)


def second_slot(story: Story) -> None:
    """Accept one more transfer in bytes of the slot of transfer 1."""
    here = at(story, E.TRANSFER_ACCEPTED, transfer=1) + 1
    story.repeat(here - 1)
    story.change(here, transfer=7, slot=5, extent=[8000, 9000])


def engine_never_ends(story: Story) -> None:
    """Unmap the slab while the engine may still write for transfer 2."""
    story.remove(E.TRANSFER_ANSWERED, PREFILL, transfer=2)
    story.remove(E.TRANSFER_DRAINED, PREFILL, transfer=2)


def told_over_a_span(story: Story) -> None:
    """Tell span 2 over bytes of span 1, whose release has not arrived."""
    story.remove(E.SPAN_CREDITED, PREFILL, **SPAN_1)
    story.change(at(story, E.SPAN_SEALED, transfer=1, sequence=2), offset=4288)


SPAN_1 = {"transfer": 1, "sequence": 1}
RULES: dict[str, tuple[Change, str, str]] = {
    "R1 overlapping slots": (second_slot, "R1", "the slot of transfer 7 overlaps that of 1"),
    "R1 another slot than leased": (
        change(E.TRANSFER_ACCEPTED, {"transfer": 2}, extent=[4096, 9000]),
        "R1",
        "in another slot than decode leased",
    ),
    "R3 span outside the slot": (
        change(E.SPAN_SEALED, {"transfer": 2}, offset=8128),
        "R3",
        "has bytes [8128, 8256) outside the slot [4096, 8192)",
    ),
    "R3 span of an old generation": (
        change(E.SPAN_SEALED, {"transfer": 2}, generation=1),
        "R3",
        "names another slot",
    ),
    "R3 layers": (change(E.SESSION_OPENED, {}, layers=[2]), "R3", "the session has 2 layers, owned are 3"),
    "R3 session with another life": (change(E.TRANSFER_DRAINED, {}, peer="ffff"), "R3", "not with ffff"),
    "R4 answered before it drained": (
        lambda story: story.move(
            at(story, E.TRANSFER_ANSWERED, transfer=2), at(story, E.TRANSFER_DRAINED, transfer=2)
        ),
        "R4",
        "answered before it has drained",
    ),
    "R4 slab unmapped under the engine": (
        engine_never_ends,
        "R4",
        "unmapped and transfer 2 has not drained",
    ),
    "R4 slab unmapped in an open session": (
        lambda story: story.move(at(story, E.SLAB_UNMAPPED), at(story, E.SESSION_CLOSED)),
        "R4",
        "while its session is open",
    ),
    "R5 sealed over bytes not released": (told_over_a_span, "R5", "bytes of span 1, which is not released"),
    "R5 sealed twice": (
        lambda story: story.repeat(at(story, E.SPAN_SEALED, **SPAN_1)),
        "R5",
        "span 1 is sealed again",
    ),
    "R5 sealed after the end": (
        lambda story: story.move(
            at(story, E.TRANSFER_DRAINED, transfer=2), at(story, E.SPAN_SEALED, transfer=2)
        ),
        "R5",
        "sealed after the transfer has drained",
    ),
    "R5 released twice": (
        lambda story: story.repeat(at(story, E.SPAN_CREDITED, **SPAN_1)),
        "R5",
        "which holds no bytes",
    ),
    "R6 answered twice": (
        lambda story: story.repeat(at(story, E.TRANSFER_ANSWERED, transfer=2)),
        "R6",
        "was not accepted, or has ended",
    ),
    "R6 transfer id used again": (
        change(E.TRANSFER_ACCEPTED, {"transfer": 2}, transfer=1),
        "R6",
        "transfer id 1 was used before",
    ),
    "R6 session closed twice": (
        lambda story: story.repeat(at(story, E.SESSION_CLOSED)),
        "R6",
        "closed before",
    ),
    "R9 slab kept": (lambda story: story.remove(E.SLAB_UNMAPPED, PREFILL), "R9", "slab of session"),
}


@pytest.mark.parametrize("row", RULES)
def test_breach_is_named(row: str, tmp_path: Path) -> None:
    """Whatever breaks a rule is found under its name, by the journal of prefill and decode together."""
    breaking, rule, words = RULES[row]
    story = make_story()
    breaking(story)

    findings = [one for one in story.audit(tmp_path).findings if one.place.file.endswith("prefill.jsonl")]

    assert findings[0].rule == rule
    assert words in findings[0].problem


def test_each_side_can_be_audited_alone(tmp_path: Path) -> None:
    """What only the other side knows is not asked for when its journal is not given."""
    decode, prefill = make_story().write(tmp_path)

    assert audit_files([decode]).is_clean
    assert audit_files([prefill]).is_clean


def test_bytes_may_be_told_again_once_they_are_released(tmp_path: Path) -> None:
    """A window smaller than the prompt is filled again after its spans came back."""
    story = make_story()
    for side, event in ((PREFILL, E.SPAN_SEALED), (DECODE, E.SPAN_SUBMITTED)):
        story.change(story.index(event, side, transfer=1, sequence=2), offset=4096)

    report = story.audit(tmp_path)

    assert report.is_clean, report.findings


def test_end_after_the_stream_needs_no_answer(tmp_path: Path) -> None:
    """Nobody is left to be sealed when the session closed while the engine ran."""
    story = make_story()
    story.remove(E.TRANSFER_ANSWERED, PREFILL, transfer=2)
    story.move(at(story, E.SESSION_CLOSED), at(story, E.TRANSFER_DRAINED, transfer=2))

    report = story.audit(tmp_path)

    assert report.is_clean, report.findings
