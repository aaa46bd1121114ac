"""A slab smaller than one prompt's KV (rows C14, H16, U1): it crosses through a ring, or fails in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from common.kv.digest import DigestKind, digest
from common.wire.failure import RemoteFailure
from decode_service.prefill import importer
from kvspan.audit.replay import audit_files
from prefill_service.credit import CreditStatistics
from tests.integration.conftest import LoadPair, shared_pair
from tests.support.cases import prompt_of
from tests.support.gates import Gate
from tests.support.pair import Pair, make_configs, running_pair, wait_until

SLAB_BYTES = 64 << 10
CAPACITY = SLAB_BYTES - 4096
RING_BYTES = CAPACITY // 2 // 4096 * 4096
LENGTHS = (500, 21, 300, 411)
"""KV of 1 KiB a token where all layers see all."""

RING_MODES = ("stream", "whole")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["DENSE", "HYB", "UNEVEN"])
async def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: dict[str, str],
    load: LoadPair,
) -> AsyncIterator[Pair]:
    """Return a running pair whose slab is small."""
    folder = tmp_path_factory.mktemp("pair")
    configs = make_configs(folder, checkpoints[request.param], slab_bytes=SLAB_BYTES)
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Pause the importing thread before each span until the gate is opened."""
    gate = Gate()

    def gated(kind: DigestKind, content: memoryview) -> bytes:
        gate.wait()
        return digest(kind, content)

    monkeypatch.setattr(importer, "digest", gated)
    yield gate
    gate.open()


def credits_of(pair: Pair) -> list[CreditStatistics]:
    """Return how the ring of the running job is used, if it has one."""
    job = pair.prefill.engine_loop.running
    return [job.ring.statistics()] if job and job.ring else []


def num_waits(pair: Pair) -> int:
    """Return how many spans of the running job found no room at first."""
    return sum(one.num_waits for one in credits_of(pair))


@pytest.mark.parametrize("mode", RING_MODES)
async def test_prompts_larger_than_the_slab_give_the_same_tokens(pair: Pair, mode: str) -> None:
    """Several at once, among them one that fits, as this process computes them alone."""
    prompts = [prompt_of(length, length) for length in LENGTHS]
    expected = [await pair.ask(prompt, 6, route="local") for prompt in prompts]

    answers = await pair.ask_all(prompts, 6, transfer=mode)

    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert answers[0].timings.num_bytes > SLAB_BYTES
    await pair.wait_idle()
    await pair.assert_no_pages_held()


async def test_c14_u1_a_paused_consumer_fails_the_producer_at_its_bound(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, gate: Gate
) -> None:
    """C14, U1: an error with the reason, no drop; bytes under the paused copy are given to nobody else."""
    configs = make_configs(tmp_path, checkpoints["DENSE"], slab_bytes=SLAB_BYTES, credit_wait_s=1.0)
    async with running_pair(*configs, load(*configs)) as pair:
        neighbour = prompt_of(21, 1)
        expected = await pair.ask(neighbour, route="local")

        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(prompt_of(300))
        assert "no credit for 16384 bytes of group 0 within 1 s (1 spans sealed and not released)" in str(
            caught.value
        )
        (peer,) = pair.decode.peers
        assert peer.statistics().slab_leased_bytes == RING_BYTES
        asked = asyncio.create_task(pair.ask(neighbour))
        await wait_until(lambda: peer.statistics().num_slots == 2)

        gate.open()
        assert (await asked).token_ids == expected.token_ids
        await pair.wait_idle()
        long = prompt_of(300)
        assert (await pair.ask(long)).token_ids == (await pair.ask(long, route="local")).token_ids


async def test_h16_c7_c10_a_producer_goes_on_at_most_its_credit(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, gate: Gate
) -> None:
    """H16, C7, C10: with pages for one request, three run one by one, each as far as its ring reaches."""
    configs = make_configs(tmp_path, checkpoints["DENSE"], slab_bytes=SLAB_BYTES, cache_tokens=320)
    prompts = [prompt_of(length, length) for length in (300, 290, 280)]
    async with running_pair(*configs, load(*configs)) as pair:
        expected = [await pair.ask(prompt, route="local") for prompt in prompts]
        asked = asyncio.create_task(pair.ask_all(prompts))
        await wait_until(lambda: num_waits(pair) == 1 and pair.decode.core.counts.live == 3)
        (credit,) = credits_of(pair)
        assert credit.held_bytes <= RING_BYTES
        status = await pair.client.status()
        assert (status.reservations.transferring, status.reservations.queued) == (1, 2)

        gate.open()

        assert [one.token_ids for one in await asked] == [one.token_ids for one in expected]


@pytest.mark.parametrize("mode", RING_MODES)
async def test_the_audit_passes_on_bytes_that_were_used_again(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, mode: str
) -> None:
    """Rule 5 as written down by both services: no byte is told again before it was released."""
    files = (tmp_path / "prefill.jsonl", tmp_path / "decode.jsonl")
    configs = make_configs(tmp_path, checkpoints["HYB"], slab_bytes=SLAB_BYTES)
    configs = (replace(configs[0], journal=str(files[0])), replace(configs[1], journal=str(files[1])))
    async with running_pair(*configs, load(*configs)) as pair:
        await pair.ask_all([prompt_of(length, length) for length in LENGTHS], transfer=mode)

    report = audit_files(files, all_stopped=True)

    assert not report.findings, report.findings
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    told = [(line["transfer"], line["offset"]) for line in lines if line["event"] == "span.sealed"]
    assert len(set(told)) < len(told)
