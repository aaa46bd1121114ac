"""Faults of a place: one of several that could take a prompt is lost, leaves or is small; or all are lost.

Theory of operation: a prompt that waits is bound to no place, so whoever never used what is lost never sees
that it was. See `faults.py` for what a fault is.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from kvspan.v1 import decode_pb2 as pb
from tests.faults.calls import ORDINARY, VICTIMS, Request
from tests.faults.cases import AFTER_DONE, Case
from tests.faults.faults import EXACT, LOST, Fault, KillPrefill, ends_well
from tests.faults.stage import Scene


class KillOneOfTwo(KillPrefill):
    """SIGKILL of one of two prefill services: the other one goes on."""

    layout = "peers"

    async def lose(self, scene: Scene) -> None:
        """Take the service away."""
        await scene.prefill.kill()

    async def strike(self, scene: Scene) -> None:
        """See `Fault`; what waits and what is new goes to the other one at once."""
        waiting = await _join_queue(scene)
        await self.lose(scene)
        await scene.until(lambda status: status.peers[0].state != pb.SESSION_STATE_OPEN)
        await scene.cluster.decode_serves(True)
        scene.decode.open("import")
        scene.decode.open("step")
        for filler in scene.others:
            filler.cancel()
        for request in (*waiting, Request(scene.cluster.clients[0], ORDINARY[0])):
            outcome = await request.outcome()
            if outcome.code != "OK":
                scene.notes.append(f"the other prefill service did not serve: {outcome}")

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        is_lost = case.policy == "fail" and case.point not in (*AFTER_DONE, "idle", "queued")
        return ("NONE",) if case.point == "idle" else (LOST,) if is_lost else (EXACT,)


class StopOneOfTwo(KillOneOfTwo):
    """SIGSTOP of one of two prefill services."""

    silence_limit_s = 2.0

    async def lose(self, scene: Scene) -> None:
        """See `KillOneOfTwo`."""
        scene.prefill.signal(signal.SIGSTOP)

    async def heal(self, scene: Scene) -> None:
        """See `Fault`."""
        scene.prefill.signal(signal.SIGCONT)


class TellOneOfTwo(KillOneOfTwo):
    """SIGTERM of one of two prefill services: it finishes what it has, and what waits goes to the other."""

    async def lose(self, scene: Scene) -> None:
        """See `KillOneOfTwo`."""
        scene.prefill.signal(signal.SIGTERM)

    async def heal(self, scene: Scene) -> None:
        """See `Fault`."""
        await ends_well(scene, scene.prefill, "prefill0")
        await scene.cluster.renew_prefill()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("NONE",) if case.point == "idle" else (EXACT,)


class KillAll(Fault):
    """SIGKILL of all prefill services: a request that may go anywhere is computed by decode itself."""

    layout = "peers"
    options = {"route": "auto", "transfer": None}  # noqa: RUF012 - read only

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        for prefill in scene.cluster.prefills:
            await prefill.kill()
        await scene.cluster.decode_serves(False)
        for filler in scene.others:
            filler.cancel()
        if scene.case.point == "idle":
            scene.send_victim(**self.options)

    async def heal(self, scene: Scene) -> None:
        """See `Fault`; not before the victim has ended, which must not need them."""
        await scene.outcome()
        for index in range(len(scene.cluster.prefills)):
            await scene.cluster.renew_prefill(index)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return (EXACT,)


class SmallPeer(Fault):
    """A prefill service takes shorter prompts than the victim: it goes where it fits."""

    max_prompt_tokens = 100

    def __init__(self, layout: str, options: dict[str, Any]) -> None:
        self.layout = layout
        self.options = options

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        await scene.prefill.kill()
        await scene.until(lambda status: status.peers[0].state != pb.SESSION_STATE_OPEN)
        small = await scene.cluster.fork_prefill(0, max_prompt_tokens=self.max_prompt_tokens)
        scene.cluster.prefills[0] = small
        await small.next_sealed("ready")
        await scene.cluster.sessions_open()
        scene.send_victim(**self.options)

    async def heal(self, scene: Scene) -> None:
        """See `Fault`; not before the victim has ended, which must not need another one."""
        await scene.outcome()
        await scene.prefill.kill()
        await scene.cluster.renew_prefill()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return (EXACT,)


async def _join_queue(scene: Scene) -> list[Request]:
    """Let two more wait when the victim does."""
    if scene.case.point != "queued":
        return []
    waiting = [Request(scene.cluster.clients[0], prompt) for prompt in VICTIMS[:2]]
    await scene.until(lambda status: status.reservations.queued == 1 + len(waiting))
    return waiting


PLACE_FAULTS: dict[str, Callable[[], Fault]] = {
    "one of two killed": KillOneOfTwo,
    "one of two stopped": StopOneOfTwo,
    "one of two told to end": TellOneOfTwo,
    "one of two is small": lambda: SmallPeer("peers", {}),
    "prefill is small": lambda: SmallPeer("pair", {"route": "auto", "transfer": None}),
    "all killed": KillAll,
}
