"""Y26: descriptors that run out keep neither requests nor operators out for long, and are told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from common.wire.channel import make_channel
from common.wire.failure import RemoteFailure
from kvspan.client import AsyncClient
from tests.support.pair import WAIT_S
from tests.support.wire import is_serving

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300), pytest.mark.usefixtures("leak_check")]

LIMIT, NUM_IDLE = 256, 400


# A shell sets the limit. A `preexec_fn` would run in a fork of this process, in which grpc may go on polling
# and end it before it has become the service.
LIMITED = ("sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh")


@contextlib.asynccontextmanager
async def running_decode(log: Path) -> AsyncIterator[str]:
    """Yield the address of a decode service that may have LIMIT descriptors."""
    decode = ("-m", "kvspan.cli", "decode", "--model", "tiny:llama", "--listen", "127.0.0.1:0")
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *LIMITED, sys.executable, *decode, stdout=asyncio.subprocess.PIPE, stderr=stderr
        )
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().split()[1]
    finally:
        process.terminate()
        await process.wait()


@contextlib.contextmanager
def idle_connections(address: str) -> Iterator[None]:
    """Hold connections on which nothing is ever said."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as held:
        for _ in range(NUM_IDLE):
            held.enter_context(socket.create_connection((host, int(port)), WAIT_S))
        yield


async def test_y26_idle_connections_keep_nobody_out_for_long(tmp_path: Path) -> None:
    """Y26: 400 idle connections at a limit of 256: all are answered, and one line tells of it."""
    log = tmp_path / "log"
    async with running_decode(log) as address, AsyncClient(address) as client:
        await client.complete(token_ids=[1], max_new_tokens=1)
        with idle_connections(address):
            assert (await client.complete(token_ids=[1], max_new_tokens=1)).token_ids
            assert await answers_new_connections(address)
            assert (await client.complete(token_ids=[1], max_new_tokens=1)).token_ids

    assert log.read_text().count("descriptors.scarce") == 1


async def answers_new_connections(address: str) -> bool:
    """Ask for health as a supervisor does: again when the connection was refused."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(RemoteFailure):
                async with make_channel(address) as channel:
                    return await is_serving(channel)
            await asyncio.sleep(0.2)
