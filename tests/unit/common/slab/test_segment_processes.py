"""Slabs over two processes: what a peer that ends, truncates or punches takes from the owner."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from common.slab.header import HEADER_BYTES
from common.slab.segment import SlabSegment
from tests.support.slabs import make_slabs, served_slab

SIZE = 3 * HEADER_BYTES
ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.multiprocess

_ATTACH = """
import ctypes, os, sys
from pathlib import Path
from common.slab.mapped import MappedSlabs, SlabLimits
from common.slab.segment import SlabSegment
directory, name, size, act = sys.argv[1:]
slabs = MappedSlabs(SlabLimits(1 << 30, 1 << 30))
peer = SlabSegment.attach(Path(directory), name, int(size), slabs)
peer.view(4096, 4)[:] = b"peer"
(fd,) = (int(fd.name) for fd in Path("/proc/self/fd").iterdir() if "/memfd:kvspan" in os.path.realpath(fd))
match act:
    case "close":
        peer.close()
    case "truncate":
        for length in (0, 1 << 20):
            try:
                os.ftruncate(fd, length)
            except PermissionError as error:
                print(error.strerror)
    case "punch":
        libc = ctypes.CDLL(None)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        print(libc.fallocate(fd, 3, 0, 12288))
"""


async def _peer(directory: Path, slab: SlabSegment, act: str) -> str:
    """Run a process that maps the slab, writes, does something and ends."""
    command = [sys.executable, "-W", "ignore", "-c", _ATTACH, str(directory), slab.name, str(SIZE), act]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


@pytest.mark.parametrize("ending", ["close", "leak"])
async def test_the_slab_stays_when_an_attached_process_exits(tmp_path: Path, ending: str) -> None:
    """A peer that ends, tidily or not, takes nothing from the owner (G1)."""
    with served_slab(tmp_path, SIZE, "boot-7") as slab:
        await _peer(tmp_path, slab, ending)

        assert bytes(slab.view(HEADER_BYTES, 4)) == b"peer"
        attach = asyncio.to_thread(SlabSegment.attach, tmp_path, slab.name, SIZE, make_slabs())
        with await attach as again:
            assert again.nonce == slab.nonce


async def test_a_peer_cannot_truncate_the_slab(tmp_path: Path) -> None:
    """Neither to nothing nor beyond its end: the owner reads what was written."""
    with served_slab(tmp_path, SIZE, "boot-7") as slab:
        said = await _peer(tmp_path, slab, "truncate")

        assert said == "Operation not permitted\n" * 2
        assert bytes(slab.view(HEADER_BYTES, 4)) == b"peer"


async def test_what_a_peer_punches_reads_as_zeros(tmp_path: Path) -> None:
    """The owner lives, and can write there again; the digest of a span finds what is missing."""
    with served_slab(tmp_path, SIZE, "boot-7") as slab:
        said = await _peer(tmp_path, slab, "punch")

        assert said == "0\n"
        view = slab.view(HEADER_BYTES, SIZE - HEADER_BYTES)
        assert not any(view)
        view[:] = b"\x07" * len(view)
        assert view[-1] == 7
