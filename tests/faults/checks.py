"""What must hold after every case: nothing is held, nothing is left, everything works, every rule was kept.

Each check yields what it found wrong, as text. Facts of other processes settle within SETTLE_S or are wrong.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvspan.audit.replay import audit_files
from tests.faults.calls import ORDINARY, Oracle, Outcome, Prompt, Request
from tests.faults.processes import Process, describe, eventually
from tests.faults.services import Cluster

SETTLE_S = 30.0

KEPT_DESCRIPTORS = ("anon_inode:", "/dev/urandom")
"""What grpc and OpenSSL open once and keep."""


@dataclass(frozen=True, slots=True)
class Census:
    """What a process holds beside its memory."""

    num_threads: int
    """Of Python."""

    descriptors: tuple[str, ...]
    """Kinds, sorted."""

    num_slabs: int
    """Mappings of slabs."""

    def excess(self, before: Census) -> str:
        """Return what is held beyond an earlier census, as text; empty when nothing is."""
        extra = list(self.descriptors)
        for kind in before.descriptors:
            if kind in extra:
                extra.remove(kind)
        found = [f"{len(extra)} descriptors ({', '.join(extra)})"] if extra else []
        if self.num_threads > before.num_threads:
            found.append(f"{self.num_threads - before.num_threads} threads")
        if self.num_slabs != before.num_slabs:
            found.append(f"{self.num_slabs} slabs mapped, {before.num_slabs} before")
        return "; ".join(found)


async def take_census(process: Process) -> Census:
    """Return what a service holds now."""
    # A call that waits to be collected here keeps its connection open there.
    gc.collect()
    num_threads = (await process.counts())["threads"]
    return Census(num_threads, tuple(sorted(_descriptors(process.pid))), _num_slabs(process.pid))


def resident_bytes(process: Process) -> int:
    """Return the memory that is the process's own, shared mappings not counted."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


class Checks:
    """Remembers what each service held when it was warm, and compares."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._warm: dict[int, Census] = {}
        self._turn = 0

    async def warm(self, cluster: Cluster) -> None:
        """Let services that are new here do everything once, and take their census."""
        services = (*cluster.decodes, *cluster.prefills)
        new = [process for process in services if process.pid not in self._warm]
        if new:
            routes = ("remote",) * len(cluster.prefills) + ("local",)
            calls = [
                Request(client, ORDINARY[0], route=route) for client in cluster.clients for route in routes
            ]
            await asyncio.gather(*(call.outcome() for call in calls))
        for process in new:
            self._warm[process.pid] = await take_census(process)

    async def leaks(self, cluster: Cluster) -> AsyncIterator[str]:
        """Yield what is still held or left."""
        for index in range(len(cluster.decodes)):
            if found := await _settled(partial(decode_holds, cluster, index)):
                yield f"decode{index} holds {found}"
        for index, process in enumerate(cluster.prefills):
            if found := await _settled(partial(prefill_holds, cluster, process)):
                yield f"prefill{index} holds {found}"
        if found := await _settled(partial(_files, cluster.slab_dir)):
            yield f"slab directory has {found}"
        for process in (*cluster.decodes, *cluster.prefills):
            if process.pid in self._warm and (found := await _settled(partial(self._excess, process))):
                yield f"{process.name} has {found} more than when it was warm"

    async def faults(self, cluster: Cluster) -> AsyncIterator[str]:
        """Yield what does not work, and every rule that the journals show broken."""
        for index, client in enumerate(cluster.clients):
            try:
                await cluster.decode_serves(True, index)
            except TimeoutError:
                yield f"decode{index} says that it does not serve"
            prompt = self._ordinary()
            outcome = await Request(client, prompt).outcome()
            if wrong := self.wrong_tokens(cluster, prompt, outcome):
                yield f"an ordinary request at decode{index}: {wrong}"
        report = audit_files([path for path in cluster.journals if path.exists()])
        for finding in report.findings:
            yield f"journal: {finding}"

    def wrong_tokens(self, cluster: Cluster, prompt: Prompt, outcome: Outcome) -> str:
        """Return how an answer differs from the oracle's; empty when it does not."""
        if outcome.code != "OK":
            return f"{outcome}: {outcome.text}"
        expected = self._oracle.answer(cluster.shape.model, prompt)
        return "" if outcome.token_ids == expected else f"{outcome.token_ids}, oracle {expected}"

    def _ordinary(self) -> Prompt:
        self._turn += 1
        return ORDINARY[self._turn % len(ORDINARY)]

    async def _excess(self, process: Process) -> str:
        return (await take_census(process)).excess(self._warm[process.pid])


async def decode_holds(cluster: Cluster, index: int = 0) -> str:
    """Return what a decode service holds, as text; empty when it is idle and its books balance."""
    status = await cluster.status(index)
    counts = {
        "lanes": status.lanes_used,
        "queued": status.reservations.queued,
        "transferring": status.reservations.transferring,
        "decoding": status.reservations.decoding,
        "draining": status.reservations.draining,
        "pages": sum(group.used_pages for group in status.groups),
        "transfers": sum(peer.num_transfers for peer in status.peers),
        "slots": sum(peer.num_slots for peer in status.peers),
        "slab bytes": sum(peer.slab_leased_bytes for peer in status.peers),
    }
    done = status.requests
    counts["requests without an end"] = (
        done.submitted - done.finished - done.failed - done.cancelled - done.refused
    )
    return describe({name: count for name, count in counts.items() if count})


async def prefill_holds(cluster: Cluster, process: Process) -> str:
    """Return what a prefill service holds beside one idle session per decode service."""
    counts = await process.counts()
    counts["sessions"] -= len(cluster.decodes)
    counts["open"] -= len(cluster.decodes)
    del counts["threads"]
    return describe({name: count for name, count in counts.items() if count})


async def _files(directory: Path) -> str:
    return ", ".join(sorted(os.listdir(directory)))


async def _settled(look: Callable[[], Awaitable[str]]) -> str:
    """Look until nothing is found; return what is still found in the end."""

    async def is_empty() -> bool:
        return not await look()

    try:
        await eventually(is_empty, SETTLE_S)
    except TimeoutError:
        return await look()
    return ""


def _num_slabs(pid: int) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sum("/memfd:kvspan-" in line for line in maps.splitlines())


def _descriptors(pid: int) -> list[str]:
    kinds = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if not target.startswith(KEPT_DESCRIPTORS):
            kinds.append(_kind(target))
    return kinds


def _kind(target: str) -> str:
    """Return what a descriptor is of; a session has one slab, each with a name of its own."""
    if "/memfd:kvspan-" in target:
        return "slab"
    return target.split(":")[0] if target.startswith(("socket:", "pipe:")) else target
