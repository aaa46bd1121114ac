"""G4: whichever signal ends a pair of real processes, nothing of it is left and the exit code is 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.wire.failure import RemoteFailure
from kvspan.client import AsyncClient

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300), pytest.mark.usefixtures("leak_check")]

END_LIMIT_S = 60


@contextlib.asynccontextmanager
async def running_pair(folder: Path, slab_dir: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield `kvspan up` once it serves at decode.sock in the folder."""
    command = [sys.executable, "-m", "kvspan.cli", "up", "--model", "tiny:llama", "--log-level", "error"]
    command += ["--listen", f"unix:{folder}/decode.sock", "--slab-dir", str(slab_dir), "--slab-bytes", "4MiB"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
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
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    async with (
        running_pair(sockets, slab_dir) as process,
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

    assert names_in(sockets, slab_dir) == []


def names_in(*folders: Path) -> list[str]:
    """Return what lies in the folders."""
    return [path.name for folder in folders for path in folder.iterdir()]


async def until_refused(client: AsyncClient) -> None:
    """Wait until the service takes no new request, by which time it has seen the first signal."""
    with pytest.raises(RemoteFailure):
        while True:
            await client.complete(token_ids=[70], max_new_tokens=1)
