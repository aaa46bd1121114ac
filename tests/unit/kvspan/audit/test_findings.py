"""Tests of what is kept of the breaches that were found."""

from __future__ import annotations

from kvspan.audit.findings import MAX_KEPT, Findings, Place


def test_findings_come_by_file_and_line() -> None:
    """Who repairs something reads from the first line on."""
    findings = Findings()
    for file, line in (("b", 2), ("a", 11), ("a", 3)):
        findings.add("R2", Place(file, line), "published twice")

    assert [str(finding.place) for finding in findings.kept] == ["a:3", "a:11", "b:2"]
    assert str(findings.kept[0]) == "a:3: R2: published twice"


def test_bad_journal_cannot_fill_the_memory() -> None:
    """Beyond a bound breaches are counted and not kept."""
    findings = Findings()
    for line in range(MAX_KEPT + 7):
        findings.add("R5", Place("a", line), "told again")

    assert len(findings.kept) == MAX_KEPT
    assert findings.counts == {"R5": MAX_KEPT + 7}
