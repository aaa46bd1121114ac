"""Runs a prefill and a decode service as child processes that live and end together.

Theory of operation: the pair ends when it is told to (`ending`) or when either child ends. It ends in order,
decode first, so that prompts which decode still waits for are finished; a child that outlasts its grace is
killed. When the operator will not wait (`hurry`), both are told again, upon which they end at once and leave
no file; one that does not is killed. Children sit in sessions of their own, so that Ctrl-C reaches only the
parent, and ask the kernel to be told when the parent is gone, so that not even a killed parent leaves an
orphan.

Ownership: `Pair` owns both processes; leaving its context leaves none behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from common.errors import ConfigError
from common.preflight import no_temporary
from common.runtime.address import MAX_PATH_BYTES
from kvspan.commands.command import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    CommandFailed,
    module_command,
)
from kvspan.commands.services import PARENT_FLAG, READY, REFUSED

HURRY_LIMIT_S, HURRY_INTERVAL_S = 3.0, 0.05
"""How long a child that is told again and again may take to end, and the pause between two signals, which
the kernel would else merge into one.
"""

LONGEST_NAME = "prefill.sock"
"""Of a socket in the directory of a pair."""

CLEAN_CODES = frozenset({0, -signal.SIGTERM})
"""Exit codes of a child that was told to end: it did so in order, or told before it took work."""


@contextlib.contextmanager
def socket_folder() -> Iterator[str]:
    """Yield a directory that only this user can enter, for the sockets of a pair; it is removed in the end.

    Raises ConfigError when there is no place for one, or its path is too long for a socket.
    """
    try:
        place = tempfile.TemporaryDirectory(prefix="kvspan-")
    except OSError as error:
        raise no_temporary(error) from error
    with place as folder:
        size = len(os.fsencode(f"{folder}/{LONGEST_NAME}"))
        if size > MAX_PATH_BYTES:
            problem = (
                f"sockets in it have paths of {size} bytes, the limit is {MAX_PATH_BYTES}; name a shorter one"
            )
            raise ConfigError("TMPDIR", os.path.dirname(folder), problem)
        yield folder


class ChildEnded(Exception):
    """A child ended although nobody asked it to."""

    def __init__(self, name: str, returncode: int, refusal: str = "") -> None:
        self.name = name
        self.returncode = returncode
        self.refusal = refusal
        super().__init__(f"{name} ended with {_ending(returncode)}")

    def failure(self) -> CommandFailed:
        """Return what the operator is told: what the child could not do, once for both children."""
        if self.refusal:
            return CommandFailed(self.refusal, EXIT_USAGE)
        return CommandFailed(f"{self}; the pair ends with it")


class Child:
    """One service process; its logs go to our stderr, whether it is ready or refuses comes through a pipe."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._refusal = ""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, command: Sequence[str]) -> Self:
        """Start a child that reads nothing and is alone in its session."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    async def read_address(self) -> str:
        """Return the address of the `ready` line; raise ChildEnded when the child ends without one."""
        # Not awaited themselves: whoever gives up waiting must not end the reading.
        ends: set[asyncio.Future[Any]] = {self._address, self._reading}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._address.done():
            return self._address.result()
        raise await self.ended()

    async def ended(self) -> ChildEnded:
        """Return how the child ended, once it has."""
        await asyncio.wait({self._reading})
        return ChildEnded(self.name, await self._process.wait(), self._refusal)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = os.fsdecode(line).removesuffix("\n")
            if text.startswith(READY) and not self._address.done():
                self._address.set_result(text.removeprefix(READY))
            elif text.startswith(REFUSED):
                self._refusal = text.removeprefix(REFUSED)

    def kill(self) -> None:
        """End the child at once, if it lives."""
        self._send(signal.SIGKILL)

    async def stop(self, limit_s: float, hurry: asyncio.Event) -> int:
        """Tell the child to end, kill it after `limit_s` (upon `hurry`, soon); return its exit code."""
        self._send(signal.SIGTERM)
        ends = {asyncio.ensure_future(self._process.wait()), asyncio.ensure_future(hurry.wait())}
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(tuple(ends))
        if hurry.is_set():
            await self._end_at_once()
        self.kill()
        await asyncio.wait({self._reading})
        return await self._process.wait()

    async def _end_at_once(self) -> None:
        """Tell the child again until it has ended, for a while."""
        for _ in range(round(HURRY_LIMIT_S / HURRY_INTERVAL_S)):
            if self._process.returncode is not None:
                return
            self._send(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), HURRY_INTERVAL_S)

    def _send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


@dataclass(frozen=True, slots=True)
class PairPlan:
    """How to start both children, and how long they may take to end."""

    decode_command: tuple[str, ...]
    prefill_command: tuple[str, ...]
    kill_after_s: float
    """Time from the request to end until a child is killed; longer than its own grace. An engine that cannot
    be stopped at once has more: see `Pair.allow`."""


def service_command(name: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a service that ends with this process."""
    return (*module_command("kvspan.start"), name, f"{PARENT_FLAG}={os.getpid()}", *arguments)


class Pair:
    """Both children, from the first process started to the last one gone.

    Invariant: `_children` are in the order in which they end: decode, then prefill.
    """

    def __init__(self, plan: PairPlan) -> None:
        self._plan = plan
        self._children: list[Child] = []
        self._hurry = asyncio.Event()
        self._longest_step_s = 0.0

    async def __aenter__(self) -> Self:
        try:
            self._children.append(await Child.start("decode", self._plan.decode_command))
            self._children.append(await Child.start("prefill", self._plan.prefill_command))
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pids(self) -> dict[str, int]:
        """Return the process ids by the names `decode` and `prefill`."""
        return {child.name: child.pid for child in self._children}

    async def read_addresses(self) -> tuple[str, str]:
        """Return the addresses of decode and prefill, once both serve."""
        return await self.read_address("decode"), await self.read_address("prefill")

    async def read_address(self, name: str) -> str:
        """Return the address of one child, once it serves; to be asked once."""
        child = next(child for child in self._children if child.name == name)
        return await child.read_address()

    async def run(self, ending: asyncio.Event, announce: Callable[[], Awaitable[None]]) -> int:
        """Announce the pair, serve until `ending` is set, stop both, and return the exit code.

        Raises ChildEnded when a child ends by itself, and what `announce` raises.
        """
        endings = [asyncio.create_task(self._watch(child)) for child in self._children]
        announcing = asyncio.ensure_future(announce())
        waiting = asyncio.create_task(ending.wait())
        tasks: list[asyncio.Future[Any]] = [*endings, announcing, waiting]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if done == {announcing}:
                announcing.result()
                done, _ = await asyncio.wait({*tasks} - {announcing}, return_when=asyncio.FIRST_COMPLETED)
            if waiting not in done:
                for task in done:
                    task.result()
        finally:
            await _cancel(tasks)
        codes = await self.stop()
        return EXIT_OK if CLEAN_CODES.issuperset(codes) else EXIT_FAILED

    def allow(self, longest_step_s: float) -> None:
        """Give a child so much longer before it is killed: for so long its engine cannot be stopped."""
        self._longest_step_s = longest_step_s

    async def stop(self) -> tuple[int, ...]:
        """End both in order, kill what outlasts its grace, and return the exit codes."""
        limit_s, hurry = self._plan.kill_after_s + self._longest_step_s, self._hurry
        return tuple([await child.stop(limit_s, hurry) for child in self._children])

    def hurry(self) -> None:
        """Have `stop` end both at once, in order; asked for once more, kill them."""
        if self._hurry.is_set():
            for child in self._children:
                child.kill()
        self._hurry.set()

    async def _watch(self, child: Child) -> None:
        raise await child.ended()


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ending(returncode: int) -> str:
    return f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
