"""G4, Y23: whichever signal ends real processes, and whenever, nothing is left and the exit code is 0."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.wire.failure import RemoteFailure
from kvspan.client import AsyncClient
from tests.support.pair import wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300), pytest.mark.usefixtures("leak_check")]

END_LIMIT_S = 60


@contextlib.asynccontextmanager
async def running_pair(
    folder: Path, slab_dir: Path, temporary: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield `kvspan up` once it serves at decode.sock in the folder."""
    command = [sys.executable, "-m", "kvspan.cli", "up", "--model", "tiny:llama", "--log-level", "error"]
    command += ["--listen", f"unix:{folder}/decode.sock", "--slab-dir", str(slab_dir), "--slab-bytes", "4MiB"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "TMPDIR": str(temporary)}
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"ready ")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
async def test_g4_a_pair_that_is_told_once_or_twice_leaves_nothing(
    tmp_path: Path, slab_dir: Path, number: signal.Signals
) -> None:
    """Once: the running answer ends first. Twice: it is cut off, and sockets and slab go all the same."""
    sockets, temporary = tmp_path / "sockets", tmp_path / "t"
    sockets.mkdir()
    temporary.mkdir()
    async with (
        running_pair(sockets, slab_dir, temporary) as process,
        AsyncClient(f"unix:{sockets}/decode.sock") as client,
    ):
        num_tokens = 40 if number is signal.SIGHUP else 900
        answer = client.generate(token_ids=range(60, 90), max_new_tokens=num_tokens, ignore_eos=True)
        await anext(answer)
        process.send_signal(number)
        if number is signal.SIGINT:
            await until_refused(client)
            process.send_signal(number)

        # A machine that is slow to send the second signal may see the answer end.
        with contextlib.suppress(*([RemoteFailure] if number is signal.SIGINT else [])):
            _ = [response async for response in answer]
        async with asyncio.timeout(END_LIMIT_S):
            assert await process.wait() == 0

    assert names_in(sockets, slab_dir, temporary) == []


AS_ROOT = ("--user", "--map-root-user") if os.geteuid() else ()
AS_PROCESS_1 = ("unshare", *AS_ROOT, "--pid", "--fork", "--mount-proc", "--kill-child")
"""As a container without an init starts its command; the kernel keeps signals without a handler from it."""


@pytest.mark.parametrize("prefix", [(), AS_PROCESS_1], ids=["process", "process 1"])
async def test_y23_a_service_that_is_told_while_it_loads_ends_in_order(
    tmp_path: Path, prefix: tuple[str, ...]
) -> None:
    """Also as the first process of a container."""
    skip_unless_allowed(prefix)
    command = [*prefix, sys.executable, "-m", "kvspan.cli", "decode", "--model=tiny:llama"]
    process = await asyncio.create_subprocess_exec(
        *command, f"--listen=unix:{tmp_path}/s", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        await wait_until(lambda: loads(service_pid(process.pid, prefix)))
        os.kill(service_pid(process.pid, prefix), signal.SIGTERM)
        async with asyncio.timeout(END_LIMIT_S):
            output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    assert (process.returncode, output) == (0, b"")


def skip_unless_allowed(prefix: tuple[str, ...]) -> None:
    """Skip where this user may not start a program as the first of a process namespace."""
    if prefix and subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a process namespace")


def service_pid(pid: int, prefix: tuple[str, ...]) -> int:
    """Return the process id of the service that a command began, as seen here; 0 while there is none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if prefix else [str(pid)]
    return int(children[0]) if children else 0


def loads(pid: int) -> bool:
    """Tell whether a process has begun to load what it computes with."""
    return bool(pid) and "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


def names_in(*folders: Path) -> list[str]:
    """Return what lies in the folders."""
    return [path.name for folder in folders for path in folder.iterdir()]


async def until_refused(client: AsyncClient) -> None:
    """Wait until the service takes no new request, by which time it has seen the first signal."""
    with pytest.raises(RemoteFailure):
        while True:
            await client.complete(token_ids=[70], max_new_tokens=1)
