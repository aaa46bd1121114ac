"""What crosses is a duration, never a time; silence is no end while pings are answered (rows T1, T3, T5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from common.session.messages import Pong, PrefillMessage
from common.wire.convert import to_proto
from common.wire.failure import RemoteFailure
from kvspan.v1 import transfer_pb2
from kvspan.v1.decode_pb2 import ROUTE_LOCAL, Timings
from prefill_service import app, servicer
from tests.integration.conftest import Configs, LoadPair
from tests.support.cases import Oracle, prompt_of
from tests.support.gates import Gate, gated
from tests.support.pair import make_configs, running_pair, wait_until

PROMPT = prompt_of(200)


@dataclass(frozen=True, slots=True)
class ShiftedClock:
    """CLOCK_MONOTONIC of another host."""

    hours: int

    def now_ns(self) -> int:
        """Return its nanoseconds."""
        return time.monotonic_ns() + self.hours * 3600 * 10**9


@pytest.mark.parametrize("hours", [-1, 1])
async def test_t3_a_clock_that_is_an_hour_off_ends_nothing_early_or_late(
    dense: Configs,
    load: LoadPair,
    oracles: Callable[[str], Oracle],
    monkeypatch: pytest.MonkeyPatch,
    hours: int,
) -> None:
    """T3: with another clock in prefill a prompt is served in its time, and one beyond its time ends."""

    monkeypatch.setattr(app, "SystemClock", lambda: ShiftedClock(hours))
    gate = Gate()
    async with running_pair(*dense, gated(load(*dense), gate)) as pair:
        gate.let_pass(4)
        answer = await pair.ask(PROMPT, 3, time_limit_s=60)
        oracles("DENSE").assert_greedy(PROMPT, answer)
        assert_own_stages(answer.timings)
        assert (await pair.client.status()).peers[0].num_clock_errors == 1
        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(PROMPT, 3, time_limit_s=0.4)
        gate.open()

    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("hours", [-1, 1])
async def test_y25_a_clock_that_is_an_hour_off_decides_no_route(
    dense: Configs, load: LoadPair, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Y25: a prompt of 3,600 s, or of minus as many, is no measurement, and turns `auto` nowhere."""
    monkeypatch.setattr(app, "SystemClock", lambda: ShiftedClock(hours))
    async with running_pair(*dense, load(*dense)) as pair:
        for route in ("local", "remote", "auto", "auto"):
            answer = await pair.ask(PROMPT, 3, route=route)
            assert answer.timings.route != ROUTE_LOCAL or route == "local"
            assert answer.timings.clock_error is (route != "local")
        before = (await pair.client.status()).peers[0].num_clock_errors
        await pair.prefill.stop()
        await wait_until(lambda: pair.decode.peers[0].session is None)
        assert (await pair.client.status()).peers[0].num_clock_errors == before > 0


def assert_own_stages(timings: Timings) -> None:
    """Check that a clock error is marked, and that stages are decode's own: none negative, all in the sum."""
    names = ("queued", "waiting", "prefill", "exposed_transfer", "first_token", "decode")
    stages = [getattr(timings, name).ToNanoseconds() for name in names]
    assert (timings.clock_error, timings.overlap, timings.num_spans_overlapped) == (True, 0, 0)
    assert min(stages) >= 0
    assert sum(stages) == timings.total.ToNanoseconds()


async def test_t1_t5_a_session_in_which_nothing_is_said_but_pings_stays_open(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    oracles: Callable[[str], Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T1, T5: a transfer that waits for the engine for three silence limits is served in its session."""
    configs, gate = make_configs(tmp_path, checkpoints["DENSE"], silence_limit_s=0.5), Gate()
    pongs: list[Pong] = []

    def counted(message: PrefillMessage) -> transfer_pb2.TransferResponse:
        if isinstance(message, Pong):
            pongs.append(message)
        return to_proto(message)

    monkeypatch.setattr(servicer, "to_proto", counted)
    async with running_pair(*configs, gated(load(*configs), gate)) as pair:
        asked = asyncio.create_task(pair.ask(PROMPT, 3))
        await wait_until(lambda: gate.num_arrived == 1)
        num_pongs = len(pongs)
        await wait_until(lambda: len(pongs) - num_pongs == 3 * 3 + 1)
        gate.open()

        oracles("DENSE").assert_greedy(PROMPT, await asked)
        assert pair.decode.peers[0].statistics().num_sessions == 1
