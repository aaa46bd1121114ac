"""Plays what is too much, too slow or too greedy: others are answered beside it with their exact tokens.

Ownership: what a crowd opens, it ends before its function returns.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from common.wire.channel import make_channel
from kvspan.client import AsyncClient
from kvspan.v1 import decode_pb2, transfer_pb2_grpc
from kvspan.v1 import transfer_pb2 as pb
from tests.faults.calls import ORDINARY, VICTIMS, Request
from tests.faults.checks import Checks
from tests.faults.hostile import HostilePrefill
from tests.faults.impostors import Impostor
from tests.faults.processes import LIMIT_S, eventually
from tests.faults.scripts import UNDRAINED
from tests.faults.services import Cluster, Shape
from tests.faults.strange import has_met, has_parted, survivor
from tests.faults.strangers import INVALID, call
from tests.faults.table import Verdict
from tests.support.slabs import served_slab

NUM_DESCRIPTORS, NUM_IDLE = 256, 400
NUM_IN_BURST = 300
"""Lanes and queue have room for 22."""

HELD_UP_S = 0.3
"""Longer than the pause before a second attempt to connect."""

NUM_CHATS = 3

NUM_GREEDY, GREEDY_SLOT_BYTES = 16, 64 << 10
"""Prompts that never get credit; each holds the engine for a second while others wait."""

IN_TURN_S = 8.0
"""Less than all of them would take together."""


async def play_idle(cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Open more connections than the service has descriptors, and say nothing on them."""
    async with survivor(cluster, checks, verdict):
        path = cluster.address("decode0").removeprefix("unix:")
        held = await asyncio.to_thread(_connect, path)
        with held:
            await _ask(cluster.clients[0], cluster, checks, verdict)
            await eventually(lambda: cluster.is_serving("decode0", "DecodeService"))


def _connect(path: str) -> ExitStack:
    with ExitStack() as held:
        for _ in range(NUM_IDLE):
            one = held.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(LIMIT_S)
            one.connect(path)
        return held.pop_all()


async def play_burst(cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Ask far more at once than there is room for: each is answered, or refused with a reason."""
    async with survivor(cluster, checks, verdict):
        requests = [Request(cluster.clients[0], ORDINARY[0]) for _ in range(NUM_IN_BURST)]
        outcomes = await asyncio.gather(*(request.outcome() for request in requests))
    ends = Counter(map(str, outcomes))
    verdict.outcome = "answered or refused"
    for outcome in outcomes:
        if outcome.code == "RESOURCE_EXHAUSTED" and outcome.reason and outcome.text:
            continue
        if wrong := checks.wrong_tokens(cluster, ORDINARY[0], outcome):
            verdict.wrong.append(f"one of a burst: {wrong}")
    if not ends["OK"] or len(ends) == 1:
        verdict.wrong.append(f"ends of a burst: {ends}")


async def play_newcomer(cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Let a client connect while the service is held up."""
    decode = cluster.decodes[0]
    async with survivor(cluster, checks, verdict), AsyncClient(cluster.address("decode0")) as newcomer:
        decode.signal(signal.SIGSTOP)
        asked = asyncio.create_task(_ask(newcomer, cluster, checks, verdict))
        # The time itself is the fault.
        await asyncio.sleep(HELD_UP_S)
        decode.signal(signal.SIGCONT)
        await asked


async def play_templates(cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Send chats whose template does not end: each is refused, and others are answered meanwhile."""
    turns = [{"role": "user", "content": "hi"}] * 4
    message = decode_pb2.GenerateRequest(chat=decode_pb2.ChatPrompt(messages=turns)).SerializeToString()
    async with survivor(cluster, checks, verdict):
        chats = [asyncio.create_task(call(cluster.address("decode0"), message)) for _ in range(NUM_CHATS)]
        await _ask(cluster.clients[0], cluster, checks, verdict)
        if any(chat.done() for chat in chats):
            verdict.wrong.append("the others waited for a template")
        ends = [str(outcome) for outcome in await asyncio.gather(*chats)]
    if set(ends) != {INVALID}:
        verdict.wrong.append(f"chats ended as {ends}")


async def play_greedy(cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Let another decode service ask for long prompts and never give a byte of its slab back."""
    async with survivor(cluster, checks, verdict), _greedy_session(cluster):
        await _ask(cluster.clients[0], cluster, checks, verdict, time_limit_s=IN_TURN_S)


@asynccontextmanager
async def _greedy_session(cluster: Cluster) -> AsyncIterator[None]:
    """Have a session in which the engine waits for credit; it says nothing else, which must not end it."""
    with served_slab(cluster.slab_dir, (NUM_GREEDY + 1) * GREEDY_SLOT_BYTES, "greedy") as slab:
        async with make_channel(cluster.address("prefill0")) as channel:
            stub = transfer_pb2_grpc.PrefillServiceStub(channel)
            me = Impostor(
                slab, (await stub.GetCapabilities(pb.PrefillServiceGetCapabilitiesRequest())).identity
            )
            stream: Any = stub.Transfer()
            await stream.write(me.hello())
            for index in range(NUM_GREEDY):
                await stream.write(_greedy_start(me, index))
            async with asyncio.timeout(LIMIT_S):
                while (await stream.read()).WhichOneof("message") != "kv_span":
                    pass
            yield
            stream.cancel()


def _greedy_start(me: Impostor, index: int) -> pb.TransferRequest:
    return me.start(
        transfer_id=index + 1,
        slot_id=index,
        slot_offset=me.slab.data.start + index * GREEDY_SLOT_BYTES,
        slot_size=GREEDY_SLOT_BYTES,
        token_ids=VICTIMS[0].token_ids,
        time_limit={"seconds": 60},
    )


async def play_undrained(hostile: HostilePrefill, cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Let a prompt never drain while a neighbour of its session is computed: another one opens beside."""
    prefill = cluster.prefills[0]
    hostile.script = UNDRAINED
    await eventually(lambda: has_met(cluster, UNDRAINED))
    num_sessions = (await cluster.status()).peers[0].num_sessions
    async with survivor(cluster, checks, verdict):
        first = Request(cluster.clients[0], VICTIMS[0])
        await eventually(lambda: _has_transfers(cluster, 1))
        # The other peer has as many prompts then, and of two alike the first is taken.
        await prefill.arm("seal")
        elsewhere = Request(cluster.clients[0], VICTIMS[2])
        await prefill.passed("seal")
        neighbour = Request(cluster.clients[0], VICTIMS[1])
        await eventually(lambda: _has_transfers(cluster, 2))
        first.cancel()
        await eventually(lambda: _num_sessions_after(cluster, num_sessions))
        hostile.is_late = True
        prefill.open("seal")
        await elsewhere.outcome()
        verdict.outcome = str(await neighbour.outcome())
    hostile.script, hostile.is_late = None, False
    hostile.end_sessions()
    if verdict.outcome != "OK":
        verdict.wrong.append(f"neighbour: {verdict.outcome}")
    await eventually(lambda: has_parted(cluster))


async def _has_transfers(cluster: Cluster, count: int) -> bool:
    return (await cluster.status()).peers[0].num_transfers == count


async def _num_sessions_after(cluster: Cluster, before: int) -> int:
    return (await cluster.status()).peers[0].num_sessions - before


async def _ask(
    client: AsyncClient, cluster: Cluster, checks: Checks, verdict: Verdict, **options: Any
) -> None:
    outcome = await Request(client, VICTIMS[0], **options).outcome()
    verdict.outcome = str(outcome)
    if wrong := checks.wrong_tokens(cluster, VICTIMS[0], outcome):
        verdict.wrong.append(f"neighbour: {wrong}")


@dataclass(frozen=True, slots=True)
class Crowd:
    """What is too much, and the services it is too much for."""

    act: Callable[[Cluster, Checks, Verdict], Awaitable[None]]
    shape: Shape = Shape()  # noqa: RUF009 - frozen


CROWDS = {
    "burst above every limit": Crowd(play_burst),
    "decode without credit": Crowd(play_greedy, Shape(silence_limit_s=LIMIT_S)),
    "new client of a service held up": Crowd(play_newcomer),
    "template that spins": Crowd(play_templates),
    "idle connections": Crowd(play_idle, Shape(num_descriptors=NUM_DESCRIPTORS)),
}
