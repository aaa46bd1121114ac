"""Brings the actors of a case to the point at which the fault strikes.

Theory of operation: the survivor is published first and held between two decode steps, so it is decoding when
the fault strikes, however long that takes. Then the victim is sent and stopped at the point by a gate:

    idle          nothing but the survivor; the victim is sent by the strike
    before_welcome   prefill has the Hello of a new session and has not looked at it
    queued        no pages are left for the victim
    requested     StartPrefill has arrived and was not looked at
    first         the first span is written and not sealed
    betweenN      N spans are sealed
    sealed        all spans are sealed, PrefillDone is not
    importing     PrefillDone has arrived, no span was copied
    published     the victim waits for its first step
    decoding      it has some tokens
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvspan.v1 import decode_pb2 as pb
from tests.faults.calls import FILLER, SURVIVOR, VICTIMS, Outcome, Prompt, Request
from tests.faults.cases import Case
from tests.faults.processes import Process, eventually
from tests.faults.services import Cluster

DECODE_GATES = frozenset({"import", "copy", "step", "done"})


@dataclass(frozen=True, slots=True)
class Gate:
    """Where a victim is stopped, or what is ordered there."""

    name: str
    skip: int = 0
    action: str = "hold"


GATES = {
    "requested": Gate("start"),
    "first": Gate("seal"),
    **{f"between{number}": Gate("seal", number) for number in range(1, 8)},
    "written": Gate("written"),
    "sealed": Gate("sealed"),
    "importing": Gate("import"),
    **{f"layer{number}": Gate("write", number) for number in range(15)},
    **{f"import{number}": Gate("import", number) for number in range(8)},
    **{f"copy{number}": Gate("copy", number) for number in range(8)},
}


class Scene:
    """One case on its services."""

    def __init__(self, case: Case, cluster: Cluster, turn: int) -> None:
        self.case = case
        self.cluster = cluster
        self.survivor_at = 1 if cluster.shape.layout == "fleet" else 0
        self.victim_prompt: Prompt = VICTIMS[turn % len(VICTIMS)]
        self.victim: Request | None = None
        self.survivor: Request | None = None
        self.others: list[Request] = []
        """Requests that a fault sends beside the victim; given up in the end."""

        self.victim_process: Process | None = None
        self.notes: list[str] = []
        """What a strike found wrong."""

        self._turn = turn

    @property
    def prefill(self) -> Process:
        """The prefill service that has the victim."""
        return self.cluster.prefills[0]

    @property
    def decode(self) -> Process:
        """The decode service that has the victim."""
        return self.cluster.decodes[0]

    async def play(self, **options: Any) -> None:
        """Bring survivor and victim to the point; `options` are of the victim's call."""
        await self.start_survivor()
        match self.case.point:
            case "idle":
                pass
            case "before_welcome":
                await self._meet_again()
                self.send_victim(**options)
            case "queued":
                self.others.append(Request(self.cluster.clients[0], FILLER, route="local"))
                await self.until(lambda status: status.reservations.decoding == 2)
                await self._send(options)
                await self.until(lambda status: status.reservations.queued == 1)
            case "published" | "decoding":
                await self._publish(options)
            case point:
                await self._stop_at(GATES[point], options)

    async def start_survivor(self) -> None:
        """Start the survivor and hold it between two steps."""
        self.survivor = Request(self.cluster.clients[self.survivor_at], SURVIVOR)
        await self.survivor.reached(2)
        holder = self.cluster.decodes[self.survivor_at]
        await holder.arm("step")
        await holder.passed("step")

    def send_victim(self, **options: Any) -> Request:
        """Send the victim now."""
        given = {"transfer": self.case.mode, **options}
        self.victim = Request(self.cluster.clients[0], self.victim_prompt, **given)
        return self.victim

    def release(self) -> None:
        """Open every gate; a process that has ended is left alone."""
        for process in (*self.cluster.decodes, *self.cluster.prefills):
            for name in {gate.name for gate in GATES.values()} | {"step", "hello", "done"}:
                process.open(name)

    async def until(self, condition: Callable[[pb.GetStatusResponse], bool]) -> pb.GetStatusResponse:
        """Wait until the status of the victim's decode service fulfils a condition."""

        async def look() -> pb.GetStatusResponse | None:
            status = await self.cluster.status()
            return status if condition(status) else None

        return await eventually(look)

    async def until_prefill(self, **expected: int) -> None:
        """Wait until the counts of the prefill service are these."""

        async def look() -> bool:
            return not expected.items() - (await self.prefill.counts()).items()

        await eventually(look)

    async def outcome(self) -> Outcome:
        """Return how the victim ended at its client."""
        if self.victim_process is not None:
            return Outcome("KILLED", text=str(await self.victim_process.wait()))
        return await self.victim.outcome() if self.victim is not None else Outcome("NONE")

    async def clear(self) -> None:
        """Give up what is still running."""
        running = [one for one in (*self.others, self.victim, self.survivor) if one and not one.has_ended]
        for request in running:
            request.cancel()
        await asyncio.gather(*(request.outcome() for request in running))

    async def _send(self, options: dict[str, Any]) -> None:
        if not self.case.is_of_a_process:
            self.send_victim(**options)
            return
        prompt = self.victim_prompt
        request = {
            "token_ids": prompt.token_ids,
            "max_new_tokens": prompt.num_tokens,
            "ignore_eos": True,
            "transfer": self.case.mode,
        }
        name = f"client-{self.cluster.folder.name}-{self._turn}"
        target = self.cluster.address("decode0")
        self.victim_process = await self.cluster.nursery.fork("client", name, target=target, request=request)

    async def _meet_again(self) -> None:
        """Replace the prefill service by one that stops at Hello."""
        await self.prefill.kill()
        await self.cluster.decode_serves(False)
        self.cluster.prefills[0] = await self.cluster.fork_prefill(0, armed=("hello",))
        await self.prefill.passed("hello")

    async def _publish(self, options: dict[str, Any]) -> None:
        decoding = 1 if self.survivor_at else 2
        if self.survivor_at:
            await self.decode.arm("step")
        await self._send(options)
        await self.until(lambda status: status.reservations.decoding == decoding)
        if self.case.point == "decoding":
            await self.decode.arm("step", skip=4)
            await self.decode.passed("step")
            if self.victim is not None:
                await self.victim.reached(2)

    async def _stop_at(self, gate: Gate, options: dict[str, Any]) -> None:
        process = self.decode if gate.name in DECODE_GATES else self.prefill
        action = self.case.action or gate.action
        await process.arm(gate.name, action, gate.skip)
        if gate.name == "import" and action == "hold":
            await self.decode.arm("done", "note")
        await self._send(options)
        await process.passed(gate.name)
        if gate.name == "import" and action == "hold" and self.case.waits_for_done:
            await self.decode.passed("done")
