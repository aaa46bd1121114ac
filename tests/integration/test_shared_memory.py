"""Slabs of running pairs (rows G2, G5, G9): who unlinks, and what a host without room does."""

from __future__ import annotations

import ast
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from decode_service.app import DecodeService
from tests.integration.conftest import Configs, LoadPair
from tests.support.cases import Oracle
from tests.support.pair import running_pair

ROOT = Path(__file__).parents[2]


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


async def test_g5_a_slab_that_does_not_fit_into_memory_is_an_error_at_start(
    dense: Configs, load: LoadPair
) -> None:
    """G5: a slab larger than what is left is refused before the service listens, with both numbers."""
    huge = replace(dense[1], slab_bytes=1 << 60)
    service = DecodeService(huge, load(*dense).decode)

    with pytest.raises(ConfigError) as caught:
        await service.start()

    assert caught.value.field == "slab_bytes"
    assert str(1 << 60) in str(caught.value)
    assert "MiB are available" in str(caught.value)
    assert not Path(huge.listen.removeprefix("unix:")).exists()  # noqa: ASYNC240


async def test_g9_left_overs_of_a_dead_owner_are_swept_at_start(
    dense: Configs, load: LoadPair, oracles: Callable[[str], Oracle]
) -> None:
    """G9: a socket nobody listens to is removed when decode starts; other files are left alone."""
    slab_dir = Path(dense[1].slab_dir)
    left_over, foreign = slab_dir / f"kvspan-{'0' * 24}.sock", slab_dir / "notes.txt"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left_over))
    foreign.write_text("mine")
    async with running_pair(*dense, load(*dense)) as pair:
        assert [path.name for path in slab_dir.iterdir()] == ["notes.txt"]  # noqa: ASYNC240
        foreign.unlink()
        oracles("DENSE").assert_greedy([1, 2, 3], await pair.ask([1, 2, 3], 2))
