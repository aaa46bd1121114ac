"""Tests of the audit on journals that a running pair wrote."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.failure import RemoteFailure
from kvspan.audit.entries import read_entries
from kvspan.audit.findings import Findings
from kvspan.audit.replay import Report, audit, audit_files
from tests.support.journals import damaged
from tests.support.models import make_prompt
from tests.support.pair import MODES, Pair, make_configs, running_pair, wait_until

pytestmark = pytest.mark.slow


class Journals:
    """Where both services of a pair write."""

    def __init__(self, directory: Path) -> None:
        self.decode = directory / "decode.jsonl"
        self.prefill = directory / "prefill.jsonl"

    def audit(self) -> Report:
        """Audit both; both lives must have stopped."""
        return audit_files([self.decode, self.prefill], all_stopped=True)


async def run(directory: Path, model: str, ask: str) -> Journals:
    """Run a pair that keeps journals, ask it everything or one small prompt, and stop it."""
    journals = Journals(directory)
    prefill, decode = make_configs(directory, model)
    prefill = replace(prefill, journal=str(journals.prefill))
    decode = replace(decode, journal=str(journals.decode))
    async with running_pair(prefill, decode) as pair:
        await (ask_everything(pair) if ask == "everything" else pair.ask(make_prompt(70)))
        await pair.wait_idle()
    return journals


async def ask_everything(pair: Pair) -> None:
    """Ask in every mode and route, many at once, one too long, and give one up during its prefill."""
    for mode in MODES:
        await pair.ask(make_prompt(150), transfer=mode)
    await pair.ask(make_prompt(101), route="local")
    given_up = asyncio.create_task(pair.ask(make_prompt(900), route="remote"))
    await wait_until(lambda: pair.decode.peers[0].statistics().num_transfers == 1)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    with pytest.raises(RemoteFailure, match="REQUEST_CAN_NEVER_FIT"):
        await pair.ask(make_prompt(1000), 5000)
    await pair.ask_all([make_prompt(200, seed) for seed in range(10)])


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:gemma3"])
async def test_running_pair_breaks_no_rule(model: str, tmp_path: Path) -> None:
    """Streamed, whole, deferred, local, cancelled and refused requests, with and without windows."""
    report = (await run(tmp_path, model, "everything")).audit()

    assert report.is_clean, [str(finding) for finding in report.findings]
    assert [life.num_held for life in report.lives] == [0, 0]
    # Three modes, one local and ten at once; the one given up was never published.
    assert report.counts["published"] == 14
    assert report.counts["reservations"] == 15
    assert report.counts["aborted"] == 1


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[list[bytes]]:
    """Return the lines of both journals of one small request."""
    journals = asyncio.run(run(tmp_path_factory.mktemp("pair"), "tiny:gemma3", "one"))
    return [path.read_bytes().splitlines(keepends=True) for path in (journals.decode, journals.prefill)]


def audit_lines(lines: list[bytes]) -> Report:
    """Audit one journal; its life must have stopped."""
    findings = Findings()
    return audit(read_entries("journal", lines, findings), findings, all_stopped=True)


@pytest.mark.parametrize("damage", ["removed", "doubled", "altered", "swapped"])
def test_damage_to_any_line_is_found(damage: str, small: list[list[bytes]]) -> None:
    """Each line in turn is removed, doubled, altered or swapped with the next: no audit passes."""
    for lines in small:
        assert audit_lines(lines).is_clean
        damages = [damaged(lines, index).get(damage) for index in range(len(lines))]
        passed = [index for index, one in enumerate(damages) if one is not None and audit_lines(one).is_clean]

        assert len(lines) - damages.count(None) > 10
        assert passed == []


def test_no_byte_can_be_changed_unseen(small: list[list[bytes]]) -> None:
    """Whatever byte of whatever line becomes another one, the audit does not pass."""

    @given(st.data())
    def check(data: st.DataObject) -> None:
        whole = bytearray(b"".join(data.draw(st.sampled_from(small))))
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] ^= data.draw(st.integers(1, 255))

        assert not audit_lines(bytes(whole).splitlines(keepends=True)).is_clean

    check()


async def test_no_prompt_is_in_a_journal(tmp_path: Path) -> None:
    """A record of bytes and pages says nothing of what was asked."""
    journals = Journals(tmp_path)
    prefill, decode = make_configs(tmp_path)
    async with running_pair(
        replace(prefill, journal=str(journals.prefill)), replace(decode, journal=str(journals.decode))
    ) as pair:
        await pair.client.complete("a secret of mine", max_new_tokens=3)
        await pair.wait_idle()

    text = journals.decode.read_text() + journals.prefill.read_text()
    assert "secret" not in text
    assert ",".join(map(str, b"secret")) not in text
