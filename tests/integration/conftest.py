"""What every integration test shares: checkpoints, loaded models, and a look for what a test left behind.

All tests of a module run on one event loop, so that they may share a running pair.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from common.wire.channel import make_channel
from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig
from tests.support import cases
from tests.support.leaks import Census, assert_no_leak, take_census
from tests.support.pair import LoadedPair, Pair, load_pair, make_configs, running_pair, wait_until

Configs = tuple[PrefillConfig, DecodeConfig]
LoadPair = Callable[[PrefillConfig, DecodeConfig], LoadedPair]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run every test of this folder on the event loop of its module."""
    for item in items:
        if Path(__file__).parent in item.path.parents and is_coroutine(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


def is_coroutine(item: pytest.Item) -> bool:
    """Tell whether a test needs a loop."""
    return isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function)


@pytest.fixture(scope="module", autouse=True)
def _light_process(checkpoints: dict[str, str], young_garbage: None) -> None:
    """Compute on one thread, as two services and the ORACLE share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folder of each model of the acceptance cases."""
    root = tmp_path_factory.mktemp("checkpoints")
    configs = {
        "DENSE": cases.dense_config(),
        "HYB": cases.hybrid_config(32),
        "HYB_ODD": cases.hybrid_config(24),
        "SHARE": cases.share_config(),
        "UNEVEN": cases.uneven_config(),
    }
    return {name: cases.save_model(config, root / name) for name, config in configs.items()}


@pytest.fixture(scope="session")
def oracles(checkpoints: dict[str, str]) -> Callable[[str], cases.Oracle]:
    """Return what makes the ORACLE of a model, each once."""
    made: dict[str, cases.Oracle] = {}

    def oracle(name: str) -> cases.Oracle:
        if name not in made:
            made[name] = cases.Oracle(checkpoints[name])
        return made[name]

    return oracle


@pytest.fixture(scope="session")
def load() -> LoadPair:
    """Return `load_pair` that loads equal configurations once; a pair of copies serves one test at a time."""
    made: dict[Configs, LoadedPair] = {}

    def loaded(prefill: PrefillConfig, decode: DecodeConfig) -> LoadedPair:
        key = (
            replace(prefill, listen="", slab_dir="", grace_s=0.0),
            replace(decode, listen="", slab_dir="", prefill=(), grace_s=0.0, queue_limit=0, slab_bytes=0),
        )
        if key not in made:
            made[key] = load_pair(prefill, decode)
        return made[key]

    return loaded


@pytest.fixture
def dense(tmp_path: Path, checkpoints: dict[str, str]) -> Configs:
    """Return configurations of a DENSE pair."""
    return make_configs(tmp_path, checkpoints["DENSE"])


@pytest.fixture
def oracle(oracles: Callable[[str], cases.Oracle]) -> cases.Oracle:
    """Return the ORACLE of DENSE."""
    return oracles("DENSE")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running DENSE pair."""
    configs = make_configs(tmp_path_factory.mktemp("pair"), checkpoints["DENSE"])
    async with shared_pair(*configs, load(*configs)) as pair:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _grpc_poller() -> AsyncIterator[None]:
    """Keep grpc's poller for the whole module: its thread and sockets live as long as any channel does."""
    async with make_channel("unix:/nowhere"):
        yield


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_left_behind(request: pytest.FixtureRequest, slab_dir: Path) -> AsyncIterator[None]:
    """Fail a test after which a thread, descriptor, child, task or a reservation is left.

    Ends of connections are noticed by grpc a moment after the call that ended them, so the check is
    repeated until it holds or time is up.
    """
    shared: Pair | None = request.getfixturevalue("pair") if "pair" in request.fixturenames else None
    before, tasks = take_census(slab_dir), _other_tasks()
    yield
    if shared is not None:
        await shared.wait_idle()
        await shared.assert_no_pages_held()
    try:
        await wait_until(lambda: _other_tasks() <= tasks and _is_clean(before, slab_dir))
    except TimeoutError:
        assert_no_leak(before, slab_dir)
        left = _other_tasks() - tasks
        pytest.fail(f"tasks left behind: {left}")


@asynccontextmanager
async def shared_pair(
    prefill: PrefillConfig, decode: DecodeConfig, loaded: LoadedPair
) -> AsyncIterator[Pair]:
    """Run a pair for all tests of a module; the threads that start with the first prompt are started.

    Both routes are measured by that, so a test that names none would get the cheaper one: it is remote here.
    """
    async with running_pair(prefill, replace(decode, route="remote"), loaded) as pair:
        await pair.ask([1, 2, 3], 1)
        await pair.ask([1, 2, 3], 1, route="local")
        yield pair


def _other_tasks() -> Counter[str]:
    """Count tasks by what they run; a server of grpc replaces the task that waits for the next call."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return Counter(getattr(task.get_coro(), "__qualname__", "unnamed") for task in others)


def _is_clean(before: Census, slab_dir: Path) -> bool:
    try:
        assert_no_leak(before, slab_dir)
    except AssertionError:
        return False
    return True
