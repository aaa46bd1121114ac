"""A chat template that takes for ever holds up neither the others nor the end of the process."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path

import pytest

from kvspan.client import AsyncClient
from tests.integration.test_signals import END_LIMIT_S, until_refused

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300), pytest.mark.usefixtures("leak_check")]

ENDLESS = "{% for one in range(99999) %}" * 4 + "{% endfor %}" * 4
TEMPLATE = "{% if messages | length > 3 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
"""Passes the trials at start."""


async def test_a_template_that_takes_for_ever_holds_up_nobody(
    tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    """Others are answered while it runs, and a second signal ends the process at once."""
    folder, address = tmp_path / "model", f"unix:{tmp_path}/d.sock"
    shutil.copytree(checkpoints["DENSE"], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "kvspan.cli", "decode", "--model", str(folder), "--listen", address]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"ready ")
        async with AsyncClient(address) as client:
            turns = [{"role": "user", "content": "hi"}] * 4
            chat = asyncio.create_task(client.complete(messages=turns))
            assert (await client.complete(token_ids=[1, 2], max_new_tokens=1)).token_ids
            assert not chat.done()

            process.send_signal(signal.SIGTERM)
            await until_refused(client)
            assert not chat.done()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), END_LIMIT_S) == 0
            await asyncio.gather(chat, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
