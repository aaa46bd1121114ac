"""Nothing is readable before everything has arrived (rows W, N8), and imports run beside the prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from common.errors import PeerLost
from common.kv.digest import DigestKind, digest
from common.session.messages import Pong, PrefillDone, PrefillMessage
from common.wire.convert import prefill_message_from_proto, to_proto
from common.wire.failure import RemoteFailure
from decode_service.prefill import importer, peer_connection
from kvspan.v1 import transfer_pb2
from prefill_service import servicer
from tests.integration.conftest import LoadPair, shared_pair
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, gated, lossy, lying
from tests.support.pair import MODES, Pair, make_configs, running_pair, wait_until

PROMPT = prompt_of(200)
"""Four chunks."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running DENSE pair."""
    configs = make_configs(tmp_path_factory.mktemp("pair"), checkpoints["DENSE"])
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


@pytest.fixture
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    """Return the ORACLE of DENSE."""
    return oracles("DENSE")


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


@pytest.mark.parametrize(
    ("lost_layer", "length", "problem"),
    [
        (2, 200, "wrote layer 3 of tokens [0, 64) before layer 2 of tokens [0, 64)"),
        (3, 200, "wrote layer 0 of tokens [64, 128) before layer 3 of tokens [0, 64)"),
        (3, 50, "ended without layer 3 of tokens [0, 50)"),
    ],
)
async def test_w7_a_layer_that_is_never_handed_over_fails_its_request_by_name(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, lost_layer: int, length: int, problem: str
) -> None:
    """W7: an engine without a hook for one layer fails in every mode, naming the layer; prefill stays up."""
    configs = make_configs(tmp_path, checkpoints["DENSE"])
    async with running_pair(*configs, lossy(load(*configs), lost_layer)) as pair:
        for mode in MODES:
            with pytest.raises(RemoteFailure) as caught:
                await pair.ask(prompt_of(length), 2, transfer=mode)
            assert problem in caught.value.message
            await pair.wait_idle()


@pytest.mark.parametrize("mode", MODES)
async def test_w13_four_prompts_in_four_slots_do_not_cross(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle, mode: str
) -> None:
    """W13: four transfers with slots of their own, imported while others run, keep their own KV."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"]), Gate()
    prompts = [prompt_of(150 + number, seed=number) for number in range(4)]
    async with running_pair(*configs, gated(load(*configs), gate)) as pair:
        asked = asyncio.create_task(pair.ask_all(prompts, 6, transfer=mode))
        await wait_until(lambda: pair.decode.peers[0].statistics().num_slots == 4)
        gate.open()
        for prompt, answer in zip(prompts, await asked, strict=True):
            oracle.assert_greedy(prompt, answer)


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


@pytest.mark.parametrize("mode", ["whole", "deferred"])
async def test_overlap_whole_and_deferred_tell_nothing_before_the_source_has_ended(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracle: Oracle, mode: str
) -> None:
    """Whole, deferred: with the engine held before its last chunk nothing is imported."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"]), Gate()
    imported: list[int] = []
    async with running_pair(*configs, gated(load(*configs), gate)) as pair:
        with pytest.MonkeyPatch.context() as patch:
            count_imports(patch, imported)
            asked = asyncio.create_task(pair.ask(PROMPT, 2, transfer=mode))
            gate.let_pass(3)
            await wait_until(lambda: gate.num_arrived == 4)
            assert imported == []
            gate.open()
            answer = await asked

    oracle.assert_greedy(PROMPT, answer)
    assert (answer.timings.num_spans_overlapped, answer.timings.overlap) == (0, 0)


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


@pytest.mark.parametrize("mode", MODES)
async def test_m4_stages_sum_to_the_whole(pair: Pair, mode: str) -> None:
    """M4: the stages of a request sum to its total exactly, none is negative, the clocks are one."""
    timings = (await pair.ask(PROMPT, 3, transfer=mode)).timings

    stages = [
        getattr(timings, name).ToNanoseconds()
        for name in ("queued", "waiting", "prefill", "exposed_transfer", "first_token", "decode")
    ]
    assert min(stages) >= 0
    assert sum(stages) == timings.total.ToNanoseconds()
    assert not timings.clock_error


def outside_slot(span: transfer_pb2.KVSpan) -> None:
    """Tell bytes that lie behind the slot."""
    span.offset += 1 << 22


def outside_slab(span: transfer_pb2.KVSpan) -> None:
    """Tell bytes that lie behind the slab, where a pointer would."""
    span.offset = 0x7F00_0000_0000


def wrong_length(span: transfer_pb2.KVSpan) -> None:
    """Tell another length than the ranges have."""
    span.length -= 64


def old_generation(span: transfer_pb2.KVSpan) -> None:
    """Tell the span of an earlier lease."""
    assert span.generation > 1
    span.generation -= 1


def future_generation(span: transfer_pb2.KVSpan) -> None:
    """Tell the span of a lease that was never made."""
    span.generation += 1


def wrong_digest(span: transfer_pb2.KVSpan) -> None:
    """Tell another digest than the bytes have."""
    span.digest = bytes(len(span.digest))


@pytest.mark.parametrize(
    "lie", [outside_slot, outside_slab, wrong_length, old_generation, future_generation, wrong_digest]
)
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


@pytest.mark.parametrize("layer", range(4))
async def test_w8_nothing_is_published_while_an_owned_layer_is_not_covered(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    oracles: Callable[[str], Oracle],
    layer: int,
) -> None:
    """W8: SHARE without the span of one owned layer, of which PrefillDone says nothing either, is refused."""
    configs, prompt = make_configs(tmp_path, checkpoints["SHARE"]), prompt_of(40)
    async with running_pair(*configs, load(*configs)) as pair:
        with pytest.MonkeyPatch.context() as patch:
            withhold(patch, layer)
            with pytest.raises(RemoteFailure) as caught:
                await pair.ask(prompt, 3)
        assert caught.value.reason == "COVERAGE_INCOMPLETE"
        assert f"layers {layer} tokens" in caught.value.message
        oracles("SHARE").assert_greedy(prompt, await pair.ask(prompt, 3))


def withhold(patch: pytest.MonkeyPatch, sequence: int) -> None:
    """Let prefill services leave out one span of a transfer, and count totals without it."""

    def told(message: PrefillMessage) -> transfer_pb2.TransferResponse:
        response = to_proto(message)
        span = response.kv_span
        if response.HasField("kv_span") and span.sequence == sequence:
            withheld.append(span)
            return to_proto(Pong(1))
        if response.HasField("prefill_done"):
            left_out = withheld.pop()
            totals = response.prefill_done.totals[left_out.group_index]
            totals.num_spans -= 1
            totals.num_bytes -= left_out.length
            num_layers = left_out.layers.stop - left_out.layers.start
            totals.layer_tokens -= num_layers * (left_out.tokens.stop - left_out.tokens.start)
        return response

    withheld: list[transfer_pb2.KVSpan] = []
    patch.setattr(servicer, "to_proto", told)


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
