"""Services of one case: which run, how they are told of each other, and how one is replaced.

    pair       decode0 -> prefill0
    peers      decode0 -> prefill0, prefill1
    fleet      decode0 -> prefill0 <- decode1
    hostile    decode0 -> the driver, prefill0

Ownership: `Cluster` owns its services; `stop` ends them in order. A service that is started again has the
address of the one before and a journal of its own.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.wire.channel import make_channel
from common.wire.failure import RemoteFailure
from kvspan.client import AsyncClient
from kvspan.v1 import decode_pb2 as pb
from tests.faults.processes import Nursery, Process, eventually
from tests.support.wire import is_serving

LAYOUTS = {"pair": (1, 1), "peers": (2, 1), "fleet": (1, 2), "hostile": (1, 1)}
"""Number of prefill and of decode services."""

CONSTANTS = {
    # Pauses between attempts, so that a case takes a second and not ten; none decides an outcome.
    "decode_service.prefill.prefill_client.REFUSED_PAUSE_S": 0.2,
    "decode_service.prefill.prefill_client.LONGEST_PAUSE_S": 0.3,
    "decode_service.prefill.slab_refusals.FIRST_PAUSE_S": 0.2,
    "decode_service.prefill.slab_refusals.LONGEST_PAUSE_S": 0.3,
    "decode_service.prefill.peer_connection.HANDSHAKE_S": 2.0,
    "decode_service.prefill.session_transfers.DRAIN_LIMIT_S": 6.0,
    # Asked for by nobody but `crowds.py`; the trials at start have three turns at most.
    "common.model.tiny._CHAT_TEMPLATE": (
        "{% if messages | length > 3 %}"
        + "{% for one in range(99999) %}" * 4
        + "{% endfor %}" * 4
        + "{% endif %}{{ messages[0].content }}"
    ),
}


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What services a case needs; cases of one shape share them."""

    model: str = "tiny:llama"
    policy: str = "fail"
    layout: str = "pair"
    silence_limit_s: float = 5.0
    grace_s: float = 15.0
    slab_bytes: int = 1 << 20
    num_descriptors: int = 0
    """How many a service may have; 0 for as many as the driver."""

    def prefill_config(self, listen: str, slab_dir: str, journal: str) -> dict[str, Any]:
        """Return the settings of a prefill service."""
        return {
            "model": self.model,
            "listen": listen,
            "dtype": "float32",
            "slab_dir": slab_dir,
            "journal": journal,
            "chunk_tokens": 64,
            "min_span_bytes": 24 << 10,
            "max_span_bytes": 48 << 10,
            "max_prompt_tokens": 1024,
            "silence_limit_s": self.silence_limit_s,
            "credit_wait_s": 2.0,
            "threads": 1,
            "grace_s": self.grace_s,
        }

    def decode_config(self, listen: str, slab_dir: str, journal: str, prefill: list[str]) -> dict[str, Any]:
        """Return the settings of a decode service."""
        return {
            "model": self.model,
            "listen": listen,
            "prefill": prefill,
            "dtype": "float32",
            "slab_dir": slab_dir,
            "slab_bytes": self.slab_bytes,
            "journal": journal,
            "page_tokens": 16,
            "chunk_tokens": 64,
            "cache_tokens": 1024,
            "lanes": 6,
            "queue_limit": 16,
            "route": "remote",
            "on_prefill_loss": self.policy,
            "silence_limit_s": self.silence_limit_s,
            "threads": 1,
            "grace_s": self.grace_s,
        }


class Cluster:
    """The running services of one shape."""

    def __init__(self, nursery: Nursery, folder: Path, shape: Shape) -> None:
        self.nursery = nursery
        self.shape = shape
        self.folder = folder
        self.slab_dir = folder / "slab"
        self.slab_dir.mkdir(parents=True)
        self.prefills: list[Process] = []
        self.decodes: list[Process] = []
        self.clients: list[AsyncClient] = []
        self.journals: list[Path] = []
        self._lives = 0

    @property
    def hostile_address(self) -> str:
        """Where decode looks for the prefill service that the driver plays."""
        return f"unix:{self.folder}/hostile.sock"

    def address(self, name: str) -> str:
        """Return the address of `prefill0`, `decode1`, …"""
        return f"unix:{self.folder}/{name}.sock"

    async def start(self) -> None:
        """Start every service and wait until all sessions are open."""
        num_prefills, num_decodes = LAYOUTS[self.shape.layout]
        self.prefills = [await self.fork_prefill(index) for index in range(num_prefills)]
        self.decodes = [await self.fork_decode(index) for index in range(num_decodes)]
        for process in (*self.prefills, *self.decodes):
            await process.next_sealed("ready")
        self.clients = [AsyncClient(self.address(f"decode{index}")) for index in range(num_decodes)]
        await self.sessions_open()

    async def stop(self) -> list[str]:
        """Drain all, decode first; return what did not end well."""
        codes: list[str] = []
        for client in self.clients:
            await client.close()
        for process in (*self.decodes, *self.prefills):
            process.signal(signal.SIGTERM)
            code = await process.wait()
            if code:
                codes.append(f"{process.name} ended with {code}: {process.tail()}")
        codes += [f"{path.name} is left" for path in self.folder.glob("*.sock")]
        return codes

    async def kill(self) -> None:
        """End all at once."""
        for client in self.clients:
            await client.close()
        for process in (*self.decodes, *self.prefills):
            await process.kill()

    async def fork_prefill(self, index: int, *, armed: tuple[str, ...] = (), **changes: object) -> Process:
        """Start a prefill service; gates in `armed` hold from the start."""
        listen, journal = self.address(f"prefill{index}"), self._journal(f"prefill{index}")
        config = self.shape.prefill_config(listen, str(self.slab_dir), journal)
        return await self._fork("prefill", f"prefill{index}", {**config, **changes}, armed)

    async def fork_decode(self, index: int) -> Process:
        """Start a decode service."""
        num_prefills = LAYOUTS[self.shape.layout][0]
        prefill = [self.address(f"prefill{number}") for number in range(num_prefills)]
        if self.shape.layout == "hostile":
            prefill.insert(0, self.hostile_address)
        listen, journal = self.address(f"decode{index}"), self._journal(f"decode{index}")
        config = self.shape.decode_config(listen, str(self.slab_dir), journal, prefill)
        return await self._fork("decode", f"decode{index}", config, ())

    async def renew_prefill(self, index: int = 0) -> None:
        """Start a prefill service in the place of one that has ended; waits until it serves."""
        self.prefills[index] = await self.fork_prefill(index)
        await self.prefills[index].next_sealed("ready")

    async def renew_decode(self, index: int = 0) -> None:
        """Start a decode service in the place of one that has ended; waits until it serves."""
        self.decodes[index] = await self.fork_decode(index)
        await self.decodes[index].next_sealed("ready")

    async def status(self, index: int = 0) -> pb.GetStatusResponse:
        """Ask a decode service, also one that has just been started."""

        async def look() -> pb.GetStatusResponse | None:
            try:
                return await self.clients[index].status()
            except RemoteFailure:
                return None

        return await eventually(look)

    async def is_serving(self, name: str, service: str) -> bool:
        """Ask a service for its health; nobody there is no health."""
        channel = make_channel(self.address(name))
        try:
            return await is_serving(channel, f"kvspan.v1.{service}", time_limit_s=20.0)
        except RemoteFailure:
            return False
        finally:
            await channel.close()

    async def decode_serves(self, expected: bool, index: int = 0) -> None:
        """Wait until the health of decode says whether it can use prefill."""

        async def look() -> bool:
            return await self.is_serving(f"decode{index}", "DecodeService.remote") is expected

        await eventually(look)

    async def prefill_drains(self, index: int = 0) -> None:
        """Wait until the health of prefill says that it takes no more."""

        async def look() -> bool:
            return not await self.is_serving(f"prefill{index}", "PrefillService")

        await eventually(look)

    async def sessions_open(self) -> None:
        """Wait until every decode service has a session with each of its real prefill services."""

        async def look() -> bool:
            statuses = [await self.status(index) for index in range(len(self.decodes))]
            peers = [peer for status in statuses for peer in status.peers]
            real = [peer for peer in peers if peer.target != self.hostile_address]
            return all(peer.state == pb.SESSION_STATE_OPEN for peer in real)

        await eventually(look)

    def _journal(self, name: str) -> str:
        self._lives += 1
        path = self.folder / f"{name}-{self._lives}.jsonl"
        self.journals.append(path)
        return str(path)

    async def _fork(self, task: str, name: str, config: dict[str, Any], armed: tuple[str, ...]) -> Process:
        orders = [{"point": point, "action": "hold"} for point in armed]
        unique = f"{self.folder.name}-{name}-{self._lives}"
        given = {"armed": orders, "constants": CONSTANTS, "num_descriptors": self.shape.num_descriptors}
        return await self.nursery.fork(task, unique, config=config, **given)
