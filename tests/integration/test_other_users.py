"""Services of two users of one host refuse each other's memory, whatever they may read and reach."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import Configs, LoadPair
from tests.support.pair import make_configs, running_decode, running_prefill, wait_until

OTHER_UID = 4321

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs to be another user"),
]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Configs]:
    """Configurations of a pair whose slab directory every user reaches and may use."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        prefill, decode = make_configs(tmp_path)
        yield replace(prefill, slab_dir=folder, listen="127.0.0.1:0"), replace(decode, slab_dir=folder)


@asynccontextmanager
async def of_another_user(name: str, config: Configs, *flags: str) -> AsyncIterator[Process]:
    """Run a service that fits ours as another user, who may read all files."""
    prefill, _ = config
    # So that it finds the program of this one; who it is, is not changed by that.
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    who = ["setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups", *may_read]
    settings = {
        "model": prefill.model,
        "dtype": prefill.dtype,
        "chunk-tokens": prefill.chunk_tokens,
        "threads": prefill.threads,
        "slab-dir": prefill.slab_dir,
        "listen": "127.0.0.1:0",
    }
    line = [f"--{flag}={value}" for flag, value in settings.items()]
    command = [*who, sys.executable, "-m", "kvspan.cli", name, *line, *flags]
    env = {**os.environ, "HOME": prefill.slab_dir}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=env)
    try:
        yield process
    finally:
        process.terminate()
        await process.communicate()


async def test_decode_hands_nothing_to_a_prefill_service_of_another_user(
    shared: Configs, load: LoadPair
) -> None:
    """The other one does not even knock: the socket is not its own."""
    async with of_another_user("prefill", shared) as process:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().split()[-1]
        decode = replace(shared[1], prefill=(address,))
        async with running_decode(decode, load(*shared).decode) as (service, _):
            await wait_until(lambda: "do not fit" in str(service.peers[0].problem))
            problem = str(service.peers[0].problem)

    assert f"slab.owner: decode uid 0, prefill uid {OTHER_UID}" in problem


async def test_prefill_takes_nothing_of_a_decode_service_of_another_user(
    shared: Configs, load: LoadPair
) -> None:
    """Not as root either."""
    async with (
        running_prefill(shared[0], load(*shared).prefill) as (_, address),
        of_another_user("decode", shared, f"--prefill={address}") as process,
    ):
        assert process.stderr is not None
        await process.stderr.readuntil(b"session.failed")
        said = await process.stderr.readline()

    assert f"slab.owner: decode uid {OTHER_UID}, prefill uid 0" in said.decode()
