"""Y30 in a process of its own, whose memory shows what the collector would hide."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from common.wire.failure import RemoteFailure
from kvspan.client import AsyncClient

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

NUM_CALLS, TEXT_BYTES, ALLOWED_BYTES = 300, 3 << 20, 32 << 20


async def test_y30_refused_calls_leave_no_memory_behind(tmp_path: Path) -> None:
    """Y30: 300 prompts of 3 MB that can never fit, one after the other, cost less than 32 MiB."""
    address = f"unix:{tmp_path}/decode.sock"
    command = [sys.executable, "-m", "kvspan.cli", "decode", "--model", "tiny:llama", "--listen", address]
    command += ["--log-level", "error"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"ready ")
        async with AsyncClient(address) as client:
            await refuse(client, 20)
            before = psutil.Process(process.pid).memory_info().rss
            await refuse(client, NUM_CALLS)
            after = psutil.Process(process.pid).memory_info().rss
    finally:
        process.terminate()
        await process.wait()

    assert after - before < ALLOWED_BYTES


async def refuse(client: AsyncClient, num_calls: int) -> None:
    """Send prompts that are too long."""
    text = "x" * TEXT_BYTES
    for _ in range(num_calls):
        with pytest.raises(RemoteFailure, match="REQUEST_CAN_NEVER_FIT"):
            await client.complete(text)
