"""Faults of a process: killed, stopped, told to end, replaced by another one; and what a victim may see.

Theory of operation: `strike` does it while the victim stands at its point, then every gate is opened, then
`heal` brings the services back. `expected` tells how the victim must end at its client, as texts of
`Outcome`; EXACT stands for OK with the oracle's tokens.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from kvspan.v1 import decode_pb2 as pb
from tests.faults.calls import ORDINARY, Request
from tests.faults.cases import AFTER_DONE, Case
from tests.faults.processes import Process
from tests.faults.stage import Scene

EXACT = "exact"
LOST = "UNAVAILABLE PREFILL_PEER_LOST"
ABSENT = "UNAVAILABLE PREFILL_UNAVAILABLE"
CUT = "UNAVAILABLE"

FREED_WITHIN_S = 5.0
"""How long a producer may hold what it had for a decode service that is gone: the project promises one
second, and a host that is busy with tests is given more.
"""

LATE = ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED DEADLINE_EXCEEDED")
"""The client's library and decode look at the same deadline; either may speak first."""


class Fault:
    """What goes wrong, and how it is put right."""

    layout = "pair"
    silence_limit_s = 5.0
    grace_s = 15.0
    slab_bytes = 1 << 20
    options: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Of the victim's call."""

    has_survivor = True
    wear = 1
    """How much of the life of its services a case takes; see `CASES_PER_CLUSTER`."""

    async def strike(self, scene: Scene) -> None:
        """Make it happen."""

    async def heal(self, scene: Scene) -> None:
        """Bring the services back."""

    def expected(self, case: Case) -> tuple[str, ...]:
        """Return how the victim may end."""
        raise NotImplementedError


class PrefillLoss(Fault):
    """Prefill is lost: the policy decides about what it has not ended."""

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        if case.point in AFTER_DONE or case.policy == "local":
            return (EXACT,)
        if case.point in ("idle", "before_welcome"):
            return (ABSENT,)
        return (LOST,) if case.policy == "fail" else (EXACT,)


class KillPrefill(PrefillLoss):
    """SIGKILL."""

    async def strike(self, scene: Scene) -> None:
        """See `Fault`; decode tells the truth about its health."""
        await scene.prefill.kill()
        await scene.cluster.decode_serves(False)
        if scene.case.point == "idle":
            scene.send_victim()

    async def heal(self, scene: Scene) -> None:
        """See `Fault`."""
        await scene.cluster.renew_prefill()


class StopPrefill(PrefillLoss):
    """SIGSTOP: hung with its connection open; goes on later and writes into a slab that was abandoned."""

    silence_limit_s = 2.0

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        scene.prefill.signal(signal.SIGSTOP)
        if scene.case.point == "idle":
            scene.send_victim()
        await scene.cluster.decode_serves(False)

    async def heal(self, scene: Scene) -> None:
        """See `Fault`."""
        scene.prefill.signal(signal.SIGCONT)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`; a victim of the idle case is sent before the silence was noticed."""
        if case.point == "idle":
            return (LOST,) if case.policy == "fail" else (EXACT,)
        return super().expected(case)


class KillDecode(Fault):
    """SIGKILL of one of two decode services of one prefill service."""

    layout = "fleet"

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        await scene.decode.kill()

    async def heal(self, scene: Scene) -> None:
        """See `Fault`; prefill is free within a second, and the slab has no name."""
        try:
            async with asyncio.timeout(FREED_WITHIN_S):
                await scene.until_prefill(sessions=1, jobs=0, pinned=0)
        except TimeoutError:
            scene.notes.append(f"prefill holds after {FREED_WITHIN_S} s: {await scene.prefill.counts()}")
        if left := [path.name for path in scene.cluster.slab_dir.iterdir()]:
            scene.notes.append(f"slab directory has {left}")
        await scene.cluster.renew_decode()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`; the status is made by the library, at once."""
        return ("NONE",) if case.point == "idle" else (CUT,)


class StopDecode(Fault):
    """SIGSTOP of one of two decode services, longer than prefill waits for a sign of life."""

    layout = "fleet"
    silence_limit_s = 2.0

    async def strike(self, scene: Scene) -> None:
        """See `Fault`; prefill ends the session, and the other decode service keeps its own."""
        scene.decode.signal(signal.SIGSTOP)
        await scene.until_prefill(open=1)

    async def heal(self, scene: Scene) -> None:
        """See `Fault`."""
        await scene.until_prefill(jobs=0, pinned=0)
        scene.decode.signal(signal.SIGCONT)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        if case.point == "idle":
            return ("NONE",)
        return (EXACT,) if case.point in AFTER_DONE else (LOST,)


class TellPrefill(PrefillLoss):
    """SIGTERM: it finishes what it has, takes nothing new and ends with 0."""

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        scene.prefill.signal(signal.SIGTERM)
        await scene.cluster.prefill_drains()

    async def heal(self, scene: Scene) -> None:
        """See `Fault`."""
        await ends_well(scene, scene.prefill, "prefill0")
        await scene.cluster.renew_prefill()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("NONE",) if case.point == "idle" else (EXACT,)


class TellPrefillLate(TellPrefill):
    """SIGTERM, and the prompt takes longer than the grace."""

    grace_s = 0.3

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        scene.prefill.signal(signal.SIGTERM)
        lasting = (pb.SESSION_STATE_OPEN, pb.SESSION_STATE_LEAVING)
        await scene.until(lambda status: status.peers[0].state not in lasting)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return PrefillLoss.expected(self, case)


class TellPrefillTwice(TellPrefill):
    """SIGTERM twice: it ends at once."""

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        await super().strike(scene)
        scene.prefill.signal(signal.SIGTERM)
        await ends_well(scene, scene.prefill, "prefill0")
        await scene.cluster.decode_serves(False)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("NONE",) if case.point == "idle" else PrefillLoss.expected(self, case)


class TellDecode(Fault):
    """SIGTERM: it refuses what is new, finishes what it has and ends with 0."""

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        scene.decode.signal(signal.SIGTERM)
        await scene.cluster.decode_serves(False)
        refused = await Request(scene.cluster.clients[0], ORDINARY[0]).outcome()
        if refused.code != "UNAVAILABLE":
            scene.notes.append(f"a request at a draining service: {refused}")

    async def heal(self, scene: Scene) -> None:
        """See `Fault`."""
        await ends_well(scene, scene.decode, "decode0")
        await scene.cluster.renew_decode()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("NONE",) if case.point == "idle" else (EXACT,)


class TellDecodeLate(TellDecode):
    """SIGTERM, and the victim takes longer than the grace: it is cut with a reason."""

    layout = "fleet"
    grace_s = 0.3

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        await super().strike(scene)
        await scene.outcome()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("UNAVAILABLE SHUTTING_DOWN",)


class TellDecodeTwice(TellDecode):
    """SIGTERM twice: it ends at once."""

    layout = "fleet"

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        scene.decode.signal(signal.SIGTERM)
        await scene.cluster.decode_serves(False)
        scene.decode.signal(signal.SIGTERM)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("NONE",) if case.point == "idle" else (CUT,)


class OtherPrefill(PrefillLoss):
    """Prefill comes back as another one, which decode refuses by name until the right one is back."""

    def __init__(self, difference: str, **changes: Any) -> None:
        self._difference = difference
        self._changes = changes

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        await scene.prefill.kill()
        impostor = await scene.cluster.fork_prefill(0, **self._changes)
        await impostor.next_sealed("ready")
        status = await scene.until(lambda status: status.peers[0].state == pb.SESSION_STATE_REFUSED)
        if self._difference not in status.peers[0].problem:
            scene.notes.append(f"{self._difference} is not told: {status.peers[0].problem}")
        await scene.cluster.decode_serves(False)
        if scene.case.point == "idle":
            scene.decode.open("step")
            await scene.send_victim().outcome()
        await impostor.kill()

    async def heal(self, scene: Scene) -> None:
        """See `Fault`."""
        await scene.cluster.renew_prefill()


async def ends_well(scene: Scene, process: Process, name: str) -> None:
    """Note when a service that was told to end does not end with 0 or leaves its socket."""
    code = await process.wait()
    if code:
        scene.notes.append(f"{name} ended with {code}")
    if f"{name}.sock" in os.listdir(scene.cluster.folder):
        scene.notes.append(f"{name} left its socket")


PROCESS_FAULTS: dict[str, Callable[[], Fault]] = {
    "prefill killed": KillPrefill,
    "prefill stopped": StopPrefill,
    "prefill told to end": TellPrefill,
    "prefill told, too late": TellPrefillLate,
    "prefill told twice": TellPrefillTwice,
    "decode killed": KillDecode,
    "decode stopped": StopDecode,
    "decode told to end": TellDecode,
    "decode told, too late": TellDecodeLate,
    "decode told twice": TellDecodeTwice,
    "other weights": lambda: OtherPrefill("fingerprint.weights", model="tiny:qwen3"),
    "another engine": lambda: OtherPrefill(
        "numerics.engine", engine="fixed-width", engine_option=["widths=64"]
    ),
    "other chunks": lambda: OtherPrefill("numerics.chunk_tokens", chunk_tokens=128),
    "other numbers": lambda: OtherPrefill("dtype", dtype="bfloat16"),
}
