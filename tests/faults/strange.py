"""Plays what strangers do: hostile peers of decode, impostors of decode, clients of every kind.

Beside each, an honest request decodes whose tokens must be exact.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvspan.v1 import decode_pb2 as pb
from tests.faults.calls import SURVIVOR, VICTIMS, Outcome, Request
from tests.faults.checks import Checks, resident_bytes
from tests.faults.faults import EXACT
from tests.faults.hostile import HostilePrefill, Script
from tests.faults.impostors import LIES, tell
from tests.faults.processes import eventually
from tests.faults.services import Cluster
from tests.faults.strangers import REQUESTS, call, cancelled_calls, silent_calls
from tests.faults.table import Verdict

GROWTH_BYTES = 48 << 20
"""How much larger a service may be after a flood; what was sent is much more."""


@asynccontextmanager
async def survivor(cluster: Cluster, checks: Checks, verdict: Verdict) -> AsyncIterator[Request]:
    """Let a request decode meanwhile, and check its tokens."""
    request = Request(cluster.clients[0], SURVIVOR, route="local")
    await request.reached(2)
    yield request
    if wrong := checks.wrong_tokens(cluster, SURVIVOR, await request.outcome()):
        verdict.wrong.append(f"survivor: {wrong}")


async def play_script(
    script: Script, hostile: HostilePrefill, cluster: Cluster, checks: Checks, verdict: Verdict
) -> None:
    """Let a prefill service lie to decode."""
    decode = cluster.decodes[0]
    hostile.script = script
    await eventually(lambda: has_met(cluster, script))
    before, peer = resident_bytes(decode), (await cluster.status()).peers[0]
    async with survivor(cluster, checks, verdict):
        if script.is_held:
            await decode.arm("import")
        victim = Request(cluster.clients[0], VICTIMS[0], time_limit_s=script.time_limit_s)
        if script.is_held:
            await eventually(lambda: _has_heard_all(cluster, peer.num_late_events))
            decode.open("import")
        outcome = await victim.outcome()
    num_marked = (await cluster.status()).peers[0].num_clock_errors - peer.num_clock_errors
    if outcome.code == "OK" and num_marked != script.lies_about_time:
        verdict.wrong.append(f"{num_marked} clock errors")
    hostile.script = None
    hostile.end_sessions()
    verdict.outcome = str(outcome)
    is_exact = not checks.wrong_tokens(cluster, VICTIMS[0], outcome)
    ends = (script.expected, script.also)
    if str(outcome) not in ends and not (script.expected == EXACT and is_exact):
        verdict.wrong.append(f"victim: {outcome} ({outcome.text}), expected {script.expected}")
    grown = resident_bytes(decode) - before
    if grown > GROWTH_BYTES:
        verdict.leaked.append(f"decode grew by {grown >> 20} MiB")
    await eventually(lambda: has_parted(cluster))


async def has_met(cluster: Cluster, script: Script) -> bool:
    """Tell whether decode has a session with the hostile peer, or says why not."""
    peer = (await cluster.status()).peers[0]
    return script.problem in peer.problem if script.problem else peer.state == pb.SESSION_STATE_OPEN


async def _has_heard_all(cluster: Cluster, num_before: int) -> bool:
    """Tell whether what came after the end was counted as late, or has ended the session."""
    peer = (await cluster.status()).peers[0]
    return peer.num_late_events > num_before or peer.state != pb.SESSION_STATE_OPEN


async def has_parted(cluster: Cluster) -> bool:
    """Tell whether decode has no session with the hostile peer."""
    return (await cluster.status()).peers[0].state != pb.SESSION_STATE_OPEN


async def play_lie(name: str, cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Let an impostor talk to prefill."""
    lie = LIES[name]
    async with survivor(cluster, checks, verdict):
        verdict.outcome = await tell(cluster.address("prefill0"), cluster.slab_dir, lie)
    if verdict.outcome != lie.expected:
        verdict.wrong.append(f"{verdict.outcome}, expected {lie.expected}")


async def play_request(name: str, cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Let a client ask decode for nonsense."""
    message, expected = REQUESTS[name]
    async with survivor(cluster, checks, verdict):
        outcome = await call(cluster.address("decode0"), message)
    verdict.outcome = str(outcome)
    if str(outcome) != expected or not outcome.text:
        verdict.wrong.append(f"{outcome} ({outcome.text}), expected {expected}")


async def play_silence(count: int, cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Let a client open calls and send nothing; another one asks, again as long as it is told to."""
    answered: list[Outcome] = []

    async def is_answered() -> bool:
        answered[:] = [await Request(cluster.clients[0], VICTIMS[0]).outcome()]
        return answered[0].reason not in ("CALLS_EXHAUSTED", "QUEUE_FULL")

    async with survivor(cluster, checks, verdict), silent_calls(cluster.address("decode0"), count):
        await eventually(is_answered)
    verdict.outcome = str(answered[0])
    if wrong := checks.wrong_tokens(cluster, VICTIMS[0], answered[0]):
        verdict.wrong.append(f"neighbour: {wrong}")


async def play_cancels(count: int, cluster: Cluster, checks: Checks, verdict: Verdict) -> None:
    """Let a client make calls and give each up."""
    decode = cluster.decodes[0]
    before = resident_bytes(decode)
    async with survivor(cluster, checks, verdict):
        await cancelled_calls(cluster.address("decode0"), count)
    verdict.outcome = str(Outcome("CANCELLED"))
    grown = resident_bytes(decode) - before
    if grown > GROWTH_BYTES:
        verdict.leaked.append(f"decode grew by {grown >> 20} MiB")
