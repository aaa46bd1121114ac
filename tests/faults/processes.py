"""The driver's side of the zygote and of the gates: start processes, signal them, talk to them.

Ownership: `Nursery` owns the zygote and with it every child; leaving its context leaves none. Only processes
that it started are ever signalled, and only while they have not been waited for.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

Found = TypeVar("Found")

ROOT = Path(__file__).parents[2]

LIMIT_S = 40.0
"""Longest wait for what takes milliseconds; a case that waits so long hangs."""

PAUSE_S = 0.005
"""Between two looks at a fact of another process."""

IMPORT_LIMIT_S = 90.0
"""Longest wait for the zygote, which imports torch."""


class Process:
    """One child of the zygote, and the line to it."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.pid = 0
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        """Exit code, or minus the signal."""

        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        """`ready`, `refused` and counts, as they come."""

        self._passed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._armed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not been waited for."""
        return bool(self.pid) and not self.ended.done()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it has ended."""
        if self.is_alive:
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """End it at once and wait for that."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def wait(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit code once it has ended."""
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(self.ended)

    async def arm(self, point: str, action: str = "hold", skip: int = 0) -> None:
        """Arm a gate, see `gates.py`; it is armed when this returns."""
        self._passed[point].clear()
        self._armed[point].clear()
        self._send(do="arm", point=point, action=action, skip=skip)
        async with asyncio.timeout(LIMIT_S):
            await self._armed[point].wait()

    def open(self, point: str) -> None:
        """Let whoever waits at a gate go on, and disarm it."""
        self._send(do="open", point=point)

    async def passed(self, point: str) -> None:
        """Wait until an armed gate was reached."""
        async with asyncio.timeout(LIMIT_S):
            await self._passed[point].wait()

    async def counts(self) -> dict[str, int]:
        """Ask for the counts of a service."""
        self._send(do="count")
        counts: dict[str, int] = (await self.next_sealed("counts"))["counts"]
        return counts

    async def next_sealed(self, *kinds: str) -> dict[str, Any]:
        """Wait for the next message that has one of these fields; others before it are dropped.

        Raises: `RuntimeError` with the end of its log when the process ends instead.
        """
        async with asyncio.timeout(IMPORT_LIMIT_S if "answers" in kinds else LIMIT_S):
            while True:
                message = asyncio.create_task(self.told.get())
                ends: set[asyncio.Future[Any]] = {message, self.ended}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not message.done():
                    message.cancel()
                    raise RuntimeError(f"{self.name} ended with {self.ended.result()}: {self.tail()}")
                if not set(kinds).isdisjoint(message.result()):
                    return message.result()

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def connected(self, writer: asyncio.StreamWriter) -> None:
        """The process has opened its line."""
        self._writer = writer

    def heard(self, message: dict[str, Any]) -> None:
        """The process said something."""
        if "at" in message:
            self._passed[message["at"]].set()
        elif "armed" in message:
            self._armed[message["armed"]].set()
        else:
            self.told.put_nowait(message)

    def _send(self, **order: object) -> None:
        if self._writer is not None and self.is_alive:
            self._writer.write(json.dumps(order).encode() + b"\n")


class Nursery:
    """The zygote, the control socket and every process of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, Process] = {}
        self._born: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._lines: set[asyncio.StreamWriter] = set()

    @property
    def control(self) -> str:
        """Address of the control socket."""
        return str(self._folder / "control")

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with theirs, (self._folder / "zygote.log").open("ab") as log:
            self._zygote = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.faults.zygote", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env=environment,
                cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=log,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._server = await asyncio.start_unix_server(self._serve_line, self.control)
        self._tasks = [asyncio.create_task(self._listen(reader))]
        async with asyncio.timeout(IMPORT_LIMIT_S):
            await self._born.get()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.signal(signal.SIGKILL)
        self._writer.close()
        await self._zygote.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for line in self._lines:
            line.close()
        self._server.close()

    async def fork(self, task: str, name: str, **arguments: object) -> Process:
        """Start a process; it runs when this returns, and may not be ready yet."""
        process = self._processes[name] = Process(name, self._folder / f"{name}.log")
        given = {**arguments, "name": name, "control": self.control}
        order = {"task": task, "name": name, "log": str(process.log), "arguments": given}
        self._writer.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(LIMIT_S):
            process.pid = (await self._born.get())["pid"]
        return process

    @property
    def living(self) -> list[str]:
        """Names of the processes that have not ended."""
        return [process.name for process in self._processes.values() if process.is_alive]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if "pid" in message:
                self._born.put_nowait(message)
            else:
                self._processes[message["name"]].ended.set_result(message["code"])

    async def _serve_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lines.add(writer)
        try:
            process = self._processes[json.loads(await reader.readline())["name"]]
            process.connected(writer)
            while line := await reader.readline():
                process.heard(json.loads(line))
        except ConnectionResetError:
            # It was killed; the zygote tells.
            pass
        finally:
            self._lines.discard(writer)
            writer.close()


async def eventually(look: Callable[[], Awaitable[Found | None]], limit_s: float = LIMIT_S) -> Found:
    """Look until something true is found, and return it. Raises: `TimeoutError`."""
    async with asyncio.timeout(limit_s):
        found = await look()
        while not found:
            await asyncio.sleep(PAUSE_S)
            found = await look()
        return found


def describe(values: Mapping[str, object]) -> str:
    """Return counts as text."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
