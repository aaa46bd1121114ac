"""Faults of one request: given up, out of time, its engine, its bytes, its slab."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.faults.calls import VICTIMS, Request
from tests.faults.cases import AFTER_PUBLICATION, Case
from tests.faults.checks import decode_holds
from tests.faults.faults import EXACT, LATE, Fault
from tests.faults.stage import Scene

DEADLINE_S = 6.0

AT_ONCE_S = 10.0
"""How long the call of a client that gives up may take to end, on a host that is busy with tests."""


class Cancel(Fault):
    """The client gives up."""

    async def strike(self, scene: Scene) -> None:
        """See `Fault`; what the producer may still write into stays held (rule 4)."""
        assert scene.victim is not None
        scene.victim.cancel()
        await scene.victim.outcome(AT_ONCE_S)
        if scene.case.point not in ("queued", *AFTER_PUBLICATION):
            await scene.until(lambda status: status.reservations.draining == 1)
            if "pages" not in await decode_holds(scene.cluster):
                scene.notes.append("pages came back while the producer could write into them")

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("CANCELLED",)


class Deadline(Fault):
    """The client's deadline passes."""

    options = {"time_limit_s": DEADLINE_S}  # noqa: RUF012 - read only

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        await scene.outcome()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return LATE


class KillClient(Fault):
    """The process of the client is killed."""

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        assert scene.victim_process is not None
        await scene.victim_process.kill()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("KILLED",)


class Broken(Fault):
    """Something raises, or bytes change, at the point; `Case.action` says what."""

    def __init__(self, expected: str) -> None:
        self._expected = expected

    async def strike(self, scene: Scene) -> None:
        """See `Fault`; the gate has done it."""
        await scene.outcome()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return (self._expected,)


class Altered(Broken):
    """Bytes change on their way: a fault of the peer, of which a session bears five."""

    wear = 6


class EngineFails(Broken):
    """The engine of prefill breaks down at the victim's prompt: the policy decides."""

    def __init__(self) -> None:
        super().__init__("UNAVAILABLE PREFILL_ENGINE_FAILED")

    async def strike(self, scene: Scene) -> None:
        """See `Fault`; a victim that runs again needs the steps that are held for now."""
        if scene.case.policy == "fail":
            await super().strike(scene)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return super().expected(case) if case.policy == "fail" else (EXACT,)


class NoCredit(Fault):
    """A prompt larger than its ring, and decode gives no byte of it back in time."""

    slab_bytes = 64 << 10

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        await scene.outcome()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return ("ABORTED LEASE_EXPIRED",)


class Window(Fault):
    """No fault: a prompt larger than the slab goes through it."""

    slab_bytes = 96 << 10

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        if scene.case.point == "idle":
            await scene.send_victim().outcome()

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`; a mode that tells nothing before the end cannot."""
        return ("OUT_OF_RANGE REQUEST_CAN_NEVER_FIT",) if case.mode == "deferred" else (EXACT,)


class FullSlab(Fault):
    """The slab holds one prompt; the one that has it is given up while the victim waits for it."""

    slab_bytes = 288 << 10

    async def strike(self, scene: Scene) -> None:
        """See `Fault`."""
        scene.others.append(Request(scene.cluster.clients[0], VICTIMS[0]))
        await scene.until(lambda status: status.reservations.queued == 1)
        assert scene.victim is not None
        held, scene.victim = scene.victim, scene.others.pop()
        scene.victim_prompt = VICTIMS[0]
        held.cancel()
        await held.outcome(AT_ONCE_S)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return (EXACT,)


class StopDecodeShortly(Fault):
    """SIGSTOP of decode for less than anybody waits: nothing is lost."""

    async def strike(self, scene: Scene) -> None:
        """See `Fault`; the gates open while it is stopped, so that messages pile up."""
        scene.decode.signal(signal.SIGSTOP)
        scene.release()
        await scene.until_prefill(jobs=0)
        scene.decode.signal(signal.SIGCONT)

    def expected(self, case: Case) -> tuple[str, ...]:
        """See `Fault`."""
        return (EXACT,)


REQUEST_FAULTS: dict[str, Callable[[], Fault]] = {
    "client cancels": Cancel,
    "client's deadline": Deadline,
    "client killed": KillClient,
    "engine raises": EngineFails,
    "engine out of memory": EngineFails,
    "engine thread exits": EngineFails,
    "bytes altered": lambda: Altered("DATA_LOSS KV_CHECKSUM"),
    "copy raises": lambda: Broken("INTERNAL ENGINE_FAILED"),
    "no credit": NoCredit,
    "prompt above slab": Window,
    "slab full": FullSlab,
    "decode stopped shortly": StopDecodeShortly,
}
