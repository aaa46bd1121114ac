"""Plays cases one after the other on shared services and gives a verdict on each.

Theory of operation: cases of one shape share their services, which are warm and idle before each case. A case
that leaves them otherwise gets fresh ones for the next.

Ownership: one `Driver` per run; it owns the cluster, which is stopped when a case needs another one.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from tests.faults import crowds, strange
from tests.faults.calls import MODELS, ORDINARY, SURVIVOR, SWARM, VICTIMS, Oracle, Outcome
from tests.faults.cases import Case
from tests.faults.checks import Checks
from tests.faults.crowds import CROWDS
from tests.faults.faults import EXACT, PROCESS_FAULTS, Fault
from tests.faults.harm import REQUEST_FAULTS
from tests.faults.hostile import HostilePrefill, Script
from tests.faults.places import PLACE_FAULTS
from tests.faults.processes import Nursery
from tests.faults.reuse import SLAB_FOR_TWO, play_reuse
from tests.faults.services import Cluster, Shape
from tests.faults.stage import Scene
from tests.faults.table import Verdict

FAULTS = {**PROCESS_FAULTS, **PLACE_FAULTS, **REQUEST_FAULTS}

CASE_LIMIT_S = 60.0

CASES_PER_CLUSTER = 24
"""After so many, those that wear more counted as more, services are stopped in order, which is a check of its
own, and replaced."""


def shape_of(case: Case) -> Shape:
    """Return the services that a case needs."""
    fault = FAULTS[case.fault]()
    return Shape(
        case.model, case.policy, fault.layout, fault.silence_limit_s, fault.grace_s, fault.slab_bytes
    )


class Driver:
    """Plays cases."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self._oracle = Oracle()
        self._checks = Checks(self._oracle)
        self._cluster: Cluster | None = None
        self._hostile: HostilePrefill | None = None
        # Invariant: of `_cluster`, when there is one.
        self._num_clusters = 0
        self._num_played = 0
        # Invariant: wear of the cases played on `_cluster`.
        self._turn = 0

    async def learn(self, models: tuple[str, ...] = MODELS) -> None:
        """Let the oracle answer what will be asked."""
        prompts = (SURVIVOR, *VICTIMS, *ORDINARY)
        await asyncio.gather(*(self._oracle.learn(self._nursery, model, prompts) for model in models))

    async def play(self, case: Case) -> Verdict:
        """Play one case."""
        fault = FAULTS[case.fault]()
        verdict = Verdict(case.fault, str(case))
        await self.judge(verdict, shape_of(case), lambda cluster: self._play(case, fault, cluster, verdict))
        self._num_played += fault.wear - 1
        return verdict

    async def play_script(self, script: Script) -> Verdict:
        """Play a lie of a prefill service."""

        async def act(cluster: Cluster) -> None:
            hostile = await self._hostile_of(cluster)
            await strange.play_script(script, hostile, cluster, self._checks, verdict)

        verdict = Verdict("hostile prefill", f"hostile prefill: {script.name}")
        return await self.judge(verdict, Shape(layout="hostile"), act)

    async def play_lie(self, name: str) -> Verdict:
        """Play what an impostor says to prefill."""
        verdict = Verdict("hostile decode", f"hostile decode: {name}")
        act = partial(strange.play_lie, name)
        return await self.judge(verdict, Shape(), lambda cluster: act(cluster, self._checks, verdict))

    async def play_request(self, name: str) -> Verdict:
        """Play what a client asks decode."""
        verdict = Verdict("hostile client", f"hostile client: {name}")
        act = partial(strange.play_request, name)
        return await self.judge(verdict, Shape(), lambda cluster: act(cluster, self._checks, verdict))

    async def play_cancels(self, count: int) -> Verdict:
        """Play calls that are given up."""
        verdict = Verdict("hostile client", f"{count} calls given up")
        act = partial(strange.play_cancels, count)
        return await self.judge(verdict, Shape(), lambda cluster: act(cluster, self._checks, verdict))

    async def play_silence(self, count: int) -> Verdict:
        """Play calls that send nothing."""
        verdict = Verdict("hostile client", f"{count} silent calls")
        act = partial(strange.play_silence, count)
        return await self.judge(verdict, Shape(), lambda cluster: act(cluster, self._checks, verdict))

    async def play_crowd(self, name: str) -> Verdict:
        """Play what is too much, too slow or too greedy."""
        verdict = Verdict("crowd", f"crowd: {name}")
        crowd = CROWDS[name]
        return await self.judge(
            verdict, crowd.shape, lambda cluster: crowd.act(cluster, self._checks, verdict)
        )

    async def play_undrained(self) -> Verdict:
        """Play a prompt that never drains beside one that does."""

        async def act(cluster: Cluster) -> None:
            await crowds.play_undrained(await self._hostile_of(cluster), cluster, self._checks, verdict)

        verdict = Verdict("hostile prefill", "hostile prefill: first never drains")
        return await self.judge(verdict, Shape(layout="hostile"), act)

    async def play_reuse(self, count: int) -> Verdict:
        """Play many requests over a slab for two."""
        await self._oracle.learn(self._nursery, SLAB_FOR_TWO.model, SWARM)
        verdict = Verdict("slab for two", f"{count} requests over a slab for two")
        act = partial(play_reuse, count)
        return await self.judge(verdict, SLAB_FOR_TWO, lambda cluster: act(cluster, self._checks, verdict))

    async def judge(
        self, verdict: Verdict, shape: Shape, act: Callable[[Cluster], Awaitable[None]]
    ) -> Verdict:
        """Run `act` on services of a shape and check them afterwards."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(CASE_LIMIT_S):
                cluster = await self._services(shape, verdict)
                await act(cluster)
                await cluster.sessions_open()
                verdict.wrong += [found async for found in self._checks.faults(cluster)]
                verdict.leaked += [found async for found in self._checks.leaks(cluster)]
                await self._checks.warm(cluster)
        except TimeoutError as error:
            verdict.hung.append(_place(error))
        except (AssertionError, RuntimeError) as error:
            verdict.wrong.append(repr(error))
        if not verdict.is_good:
            await self._abandon()
        verdict.seconds = time.monotonic() - began
        return verdict

    async def close(self) -> list[str]:
        """Stop the services; return what did not end well."""
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return []
        await self._dismiss()
        found = await cluster.stop()
        found += [f"slab directory has {path.name}" for path in cluster.slab_dir.iterdir()]
        return found + [f"{name} lives" for name in self._nursery.living]

    async def _play(self, case: Case, fault: Fault, cluster: Cluster, verdict: Verdict) -> None:
        self._turn += 1
        scene = Scene(case, cluster, self._turn)
        try:
            await scene.play(**fault.options)
            assert scene.survivor is not None
            assert not scene.survivor.has_ended
            await fault.strike(scene)
            scene.release()
            await fault.heal(scene)
            outcome = await scene.outcome()
            survived = await scene.survivor.outcome()
        finally:
            scene.release()
            await scene.clear()
        verdict.wrong += scene.notes
        if found := self._checks.wrong_tokens(cluster, scene.survivor.prompt, survived):
            verdict.wrong.append(f"survivor: {found}")
        self._judge_victim(scene, fault, outcome, verdict)

    def _judge_victim(self, scene: Scene, fault: Fault, outcome: Outcome, verdict: Verdict) -> None:
        expected = fault.expected(scene.case)
        verdict.outcome = EXACT if outcome.code == "OK" else str(outcome)
        if verdict.outcome not in expected:
            verdict.wrong.append(f"victim: {outcome} ({outcome.text}), expected {' or '.join(expected)}")
        elif outcome.code == "OK":
            if found := self._checks.wrong_tokens(scene.cluster, scene.victim_prompt, outcome):
                verdict.wrong.append(f"victim: {found}")
        elif outcome.code != "NONE" and not (outcome.reason or outcome.text):
            verdict.wrong.append(f"victim: {outcome} without a reason")

    async def _services(self, shape: Shape, verdict: Verdict) -> Cluster:
        """Return warm services of a shape."""
        self._num_played += 1
        is_worn = self._num_played > CASES_PER_CLUSTER
        if self._cluster is not None and (self._cluster.shape != shape or is_worn):
            verdict.leaked += await self.close()
        if self._cluster is None:
            self._num_clusters += 1
            self._num_played = 0
            folder = self._folder / f"c{self._num_clusters}"
            cluster = self._cluster = Cluster(self._nursery, folder, shape)
            await cluster.start()
            await self._checks.warm(cluster)
        return self._cluster

    async def _abandon(self) -> None:
        """End services that are in an unknown state."""
        await self._dismiss()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.kill()

    async def _hostile_of(self, cluster: Cluster) -> HostilePrefill:
        """Return the hostile peer of the services that run."""
        if self._hostile is None:
            identity = (await cluster.clients[0].capabilities()).identity
            self._hostile = HostilePrefill(cluster.hostile_address, identity, cluster.slab_dir)
            await self._hostile.start()
        return self._hostile

    async def _dismiss(self) -> None:
        hostile, self._hostile = self._hostile, None
        if hostile is not None:
            await hostile.stop()


def _place(error: TimeoutError) -> str:
    """Return where the driver waited in vain, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tests/faults/" in frame.filename]
    return " > ".join(f"{Path(frame.filename).stem}.{frame.name}:{frame.lineno}" for frame in ours)
