"""Nothing is readable before everything has arrived (rows W, N8), and imports run beside the prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from common.errors import PeerLost
from common.kv.digest import DigestKind, digest
from common.session.messages import PrefillDone, PrefillMessage
from common.wire.convert import prefill_message_from_proto
from common.wire.failure import RemoteFailure
from decode_service.prefill import importer, peer_connection
from kvspan.v1 import transfer_pb2
from tests.integration.conftest import LoadPair
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, gated, lying
from tests.support.pair import MODES, Pair, make_configs, running_pair, wait_until

PROMPT = prompt_of(200)
"""Four chunks."""


@pytest.mark.parametrize("mode", MODES)
async def test_w5_w6_kv_told_and_not_copied_is_not_visible(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """W5, W6: while the copy of one span waits, nothing is published, no token sent and no step made."""
    gate = Gate()
    monkeypatch.setattr(importer, "digest", digest_after(gate))
    steps = (await pair.client.status()).num_steps
    asked = asyncio.create_task(pair.ask(PROMPT, 3, transfer=mode))

    gate.let_pass(2)
    await wait_until(lambda: gate.num_arrived == 3)
    await wait_until(lambda: num_jobs(pair) == 0)  # PrefillDone was sent
    status = await pair.client.status()

    assert (status.reservations.transferring, status.reservations.decoding) == (1, 0)
    assert status.num_steps == steps
    assert not asked.done()
    gate.open()
    oracle.assert_greedy(PROMPT, await asked)


async def test_overlap_stream_imports_while_the_source_computes(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle
) -> None:
    """Stream: with the engine held before its last chunk, the spans of all earlier ones are imported."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"]), Gate()
    imported: list[int] = []
    async with running_pair(*configs, gated(load(*configs), gate)) as pair:
        with pytest.MonkeyPatch.context() as patch:
            count_imports(patch, imported)
            asked = asyncio.create_task(pair.ask(PROMPT, 2, transfer="stream"))
            gate.let_pass(3)
            await wait_until(lambda: gate.num_arrived == 4 and len(imported) >= 3)
            held = len(imported)
            gate.open()
            answer = await asked

    oracle.assert_greedy(PROMPT, answer)
    assert 3 <= held <= answer.timings.num_spans_overlapped <= answer.timings.num_spans
    assert answer.timings.overlap > 0


async def test_y29_a_prompt_whose_end_was_accepted_is_answered_without_its_prefill_service(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Y29: the stream breaks after PrefillDone, while all copies but one wait; the answer is the same."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"]), Gate()
    monkeypatch.setattr(importer, "digest", digest_after(gate))
    heard: list[PrefillMessage] = []
    keep_heard(monkeypatch, heard)
    async with running_pair(*configs, load(*configs)) as pair:
        asked = asyncio.create_task(pair.ask(PROMPT, 3))
        gate.let_pass(1)
        await wait_until(lambda: any(isinstance(message, PrefillDone) for message in heard))
        first = pair.decode.peers[0].session
        break_stream(monkeypatch, pair)
        await wait_until(lambda: first is not None and not first.is_open)

        assert not asked.done()
        gate.open()
        oracle.assert_greedy(PROMPT, await asked)


def outside_slot(span: transfer_pb2.KVSpan) -> None:
    """Tell bytes that lie behind the slot."""
    span.offset += 1 << 22


def old_generation(span: transfer_pb2.KVSpan) -> None:
    """Tell the span of an earlier lease."""
    assert span.generation > 1
    span.generation -= 1


def wrong_digest(span: transfer_pb2.KVSpan) -> None:
    """Tell another digest than the bytes have."""
    span.digest = bytes(len(span.digest))


@pytest.mark.parametrize("lie", [outside_slot, old_generation])
async def test_w1_w18_n8_a_span_that_lies_fails_its_request_alone(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, lie: Callable[[transfer_pb2.KVSpan], None]
) -> None:
    """W1, W18, N8: a false field gives a status that is not OK, no token, and harms no neighbour."""
    liar, honest = prompt_of(130, seed=8), prompt_of(140, seed=9)
    victims: set[int] = set()

    def lie_once(span: transfer_pb2.KVSpan) -> None:
        victims.add(span.transfer_id)
        if span.transfer_id == min(victims):
            lie(span)

    lying(monkeypatch, lie_once)
    first, second = await asyncio.gather(pair.ask(liar, 3), pair.ask(honest, 3), return_exceptions=True)

    assert isinstance(first, RemoteFailure)
    assert first.code is grpc.StatusCode.DATA_LOSS
    assert not isinstance(second, BaseException)
    oracle.assert_greedy(honest, second)


async def test_h3_a_wrong_digest_in_mid_life_fails_one_request_and_no_session(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H3: bytes that do not match are an error of their request, never a success; the session goes on."""
    oracle.assert_greedy(PROMPT, await pair.ask(PROMPT, 3))
    with monkeypatch.context() as patch:
        lying(patch, wrong_digest)
        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(PROMPT, 3)

    assert caught.value.reason == "KV_CHECKSUM"
    oracle.assert_greedy(PROMPT, await pair.ask(PROMPT, 3))
    assert pair.decode.peers[0].statistics().num_sessions == 1


def keep_heard(patch: pytest.MonkeyPatch, heard: list[PrefillMessage]) -> None:
    """Append what decode hears from prefill services."""

    def kept(response: transfer_pb2.TransferResponse) -> PrefillMessage:
        heard.append(prefill_message_from_proto(response))
        return heard[-1]

    patch.setattr(peer_connection, "prefill_message_from_proto", kept)


def break_stream(patch: pytest.MonkeyPatch, pair: Pair) -> None:
    """Break the one session of a pair behind the next word that prefill says in it."""

    async def broken() -> None:
        raise PeerLost("the stream broke")

    (peer,) = pair.prefill.servicer.peers
    patch.setattr(peer, "next_message", broken)


def digest_after(gate: Gate) -> Callable[[DigestKind, memoryview], bytes]:
    """Return the digest as the importer takes it, after the gate."""

    def held(kind: DigestKind, data: memoryview) -> bytes:
        gate.wait()
        return digest(kind, data)

    return held


def count_imports(patch: pytest.MonkeyPatch, imported: list[int]) -> None:
    """Append the length of every span whose copy has begun."""

    def counted(kind: DigestKind, data: memoryview) -> bytes:
        imported.append(len(data))
        return digest(kind, data)

    patch.setattr(importer, "digest", counted)


def num_jobs(pair: Pair) -> int:
    """Return the prompts that prefill has accepted and not ended."""
    return sum(peer.statistics().num_jobs for peer in pair.prefill.servicer.peers)
