"""Slabs of running pairs (rows G1, G2, G5): who unlinks, what a small mount does, and two pairs at once."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.slab.segment import SlabSegment
from decode_service.app import DecodeService
from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig
from tests.integration.conftest import LoadPair
from tests.support.cases import Oracle, prompt_of
from tests.support.pair import make_configs, running_pair

Configs = tuple[PrefillConfig, DecodeConfig]

ROOT = Path(__file__).parents[2]

ATTACH = """
import sys
from pathlib import Path
from common.slab.segment import SlabSegment
slab = SlabSegment.attach(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
slab.buffer[0:5] = b"hello"
slab.close()
"""


@pytest.mark.multiprocess
async def test_g1_a_process_that_attached_and_left_takes_nothing_with_it(slab_dir: Path) -> None:
    """G1: when the process that mapped a slab ends, name and bytes are still there for the owner."""
    with SlabSegment.create(slab_dir, 64 << 10, "boot") as slab:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ATTACH, str(slab_dir), slab.name, str(slab.size_bytes), cwd=ROOT
        )
        assert await process.wait() == 0

        assert [path.name for path in slab_dir.iterdir()] == [slab.name]  # noqa: ASYNC240
        assert bytes(slab.buffer[:5]) == b"hello"


def sources() -> Iterator[Path]:
    """Yield every module that a service imports."""
    for package in ("common", "decode_service", "prefill_service", "kvspan"):
        yield from (ROOT / package).rglob("*.py")


def test_g2_no_module_uses_a_resource_tracker() -> None:
    """G2: shared memory is our own mapping; nothing imports multiprocessing, whose tracker unlinks files."""
    imported = {
        (path.name, name)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
        if name.split(".")[0] == "multiprocessing"
    }

    assert imported == set()


async def test_g5_a_slab_that_does_not_fit_its_mount_is_an_error_at_start(
    dense: Configs, load: LoadPair
) -> None:
    """G5: a slab larger than its directory is refused before the service listens, with both numbers."""
    huge = replace(dense[1], slab_bytes=1 << 60)
    service = DecodeService(huge, load(*dense).decode)

    with pytest.raises(ConfigError) as caught:
        await service.start()

    assert caught.value.field == "slab_bytes"
    assert str(1 << 60) in str(caught.value)
    assert "bytes free" in str(caught.value)
    assert not Path(huge.listen.removeprefix("unix:")).exists()  # noqa: ASYNC240


async def test_g5_a_slab_directory_that_is_missing_is_an_error_at_start(
    dense: Configs, load: LoadPair, tmp_path: Path
) -> None:
    """G5: a directory that is not there is named at start, and nothing of the service stays."""
    service = DecodeService(replace(dense[1], slab_dir=str(tmp_path / "none")), load(*dense).decode)

    with pytest.raises(ConfigError, match="slab_dir="):
        await service.start()


async def test_g5_two_pairs_in_one_slab_directory_do_not_meet(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, oracles: Callable[[str], Oracle]
) -> None:
    """G5: two pairs of different models share a directory, and each answers as its own ORACLE."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    slab_dir = tmp_path / "shared"
    slab_dir.mkdir()
    first = make_configs(tmp_path / "a", checkpoints["DENSE"], slab_dir=str(slab_dir))
    second = make_configs(tmp_path / "b", checkpoints["HYB"], slab_dir=str(slab_dir))
    prompt = prompt_of(90)
    async with running_pair(*first, load(*first)) as one, running_pair(*second, load(*second)) as two:
        answers = await asyncio.gather(one.ask(prompt, 4), two.ask(prompt, 4))

    for name, answer in zip(("DENSE", "HYB"), answers, strict=True):
        oracles(name).assert_greedy(prompt, answer)


async def test_g9_left_overs_of_a_dead_owner_are_swept_at_start(
    dense: Configs, load: LoadPair, oracles: Callable[[str], Oracle]
) -> None:
    """G9: a slab file nobody holds is removed when decode starts; other files are left alone."""
    slab_dir = Path(dense[1].slab_dir)
    left_over, foreign = slab_dir / f"kvspan-{'0' * 24}.slab", slab_dir / "notes.txt"
    left_over.write_bytes(bytes(8192))
    foreign.write_text("mine")
    async with running_pair(*dense, load(*dense)) as pair:
        assert [path.name for path in slab_dir.iterdir()] == ["notes.txt"]  # noqa: ASYNC240
        foreign.unlink()
        oracles("DENSE").assert_greedy([1, 2, 3], await pair.ask([1, 2, 3], 2))
