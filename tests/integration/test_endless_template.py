"""A chat template that takes all time or memory holds up neither the others nor the end of the process."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from common.wire.failure import RemoteFailure
from kvspan.client import AsyncClient
from tests.integration.test_signals import END_LIMIT_S, until_refused

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300), pytest.mark.usefixtures("leak_check")]

ENDLESS = "{% for one in range(99999) %}" * 4 + "{% endfor %}" * 4
MOST_BYTES = 1 << 30
"""Of a service with a tiny model, far below what the template would take."""

GROWING = "{% set n = namespace(s='x') %}{% for one in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"

HOSTILE_CHAT = [{"role": "user", "content": "hi"}] * 4


@asynccontextmanager
async def served(folder: Path, checkpoint: str, template: str) -> AsyncIterator[tuple[Process, AsyncClient]]:
    """Yield a decode service whose model has a template, as a process, and a client of it."""
    address = f"unix:{folder}/d.sock"
    shutil.copytree(checkpoint, folder / "model")
    body = "{% if messages | length > 3 %}" + template + "{% endif %}{{ messages[0].content }}"
    (folder / "model/chat_template.jinja").write_text(body)
    command = [
        sys.executable, "-m", "kvspan.cli", "decode", "--model", str(folder / "model"), "--listen", address,
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"ready ")
        async with AsyncClient(address) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_template_that_takes_all_memory_takes_nobody_else_s(
    tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    """Its chat is refused by name, others are answered meanwhile, and the next chat is; no process stays."""
    async with served(tmp_path, checkpoints["DENSE"], GROWING) as (process, client):
        family = psutil.Process(process.pid)
        chat = asyncio.create_task(client.complete(messages=HOSTILE_CHAT))
        assert (await client.complete(token_ids=[1, 2], max_new_tokens=1)).token_ids
        with pytest.raises(RemoteFailure, match=r"chat: .* MiB of memory"):
            await chat

        assert (await client.complete(messages=HOSTILE_CHAT[:1], max_new_tokens=1)).token_ids
        assert family.memory_info().rss < MOST_BYTES
        (reader,) = family.children()

        process.kill()
        await process.wait()
        reader.wait(END_LIMIT_S)


async def test_a_template_that_takes_for_ever_holds_up_nobody(
    tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    """Others are answered while it runs, and a second signal ends the process at once."""
    async with served(tmp_path, checkpoints["DENSE"], ENDLESS) as (process, client):
        chat = asyncio.create_task(client.complete(messages=HOSTILE_CHAT))
        assert (await client.complete(token_ids=[1, 2], max_new_tokens=1)).token_ids
        assert not chat.done()

        process.send_signal(signal.SIGTERM)
        await until_refused(client)
        assert not chat.done()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), END_LIMIT_S) == 0
        await asyncio.gather(chat, return_exceptions=True)
