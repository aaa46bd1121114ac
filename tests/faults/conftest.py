"""Which cases run, and the table of what came of them.

Plain runs play a short matrix; `--full-faults` plays all of it, which takes minutes.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.cases import ROWS, SHORT_ROWS, expand
from tests.faults.crowds import CROWDS
from tests.faults.driver import Driver, shape_of
from tests.faults.impostors import LIES
from tests.faults.processes import Nursery
from tests.faults.scripts import SCRIPTS
from tests.faults.strangers import REQUESTS
from tests.faults.table import Verdict, table_lines
from tests.support.places import short_folder

SHORT_SCRIPTS = (
    "span of an old generation",
    "a gap and totals of it",
    "welcome twice",
    "flood of duplicates",
)
"""Lies of the short matrix."""

VERDICTS = pytest.StashKey[list[Verdict]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that asks for everything; known when this folder is named on the command line."""
    parser.addoption("--full-faults", action="store_true", help="play every fault at every point")


def _is_full(config: pytest.Config) -> bool:
    """Tell whether everything is asked for."""
    return bool(config.getoption("--full-faults", default=False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the arguments of tests their values; cases that share services follow one another."""
    everything = _is_full(metafunc.config)
    cases = [*expand(ROWS if everything else SHORT_ROWS)]
    scripts = [script for script in SCRIPTS if everything or script.name in SHORT_SCRIPTS]
    values: dict[str, list[Any]] = {
        "case": sorted(cases, key=shape_of),
        "script": scripts,
        "lie": [*LIES][: None if everything else 1],
        "nonsense": [*REQUESTS][: None if everything else 1],
        "crowd": [*CROWDS][: None if everything else 1],
        "num_cancels": [10_000 if everything else 300],
        "num_silent": [3000 if everything else 300],
        "num_reuses": [1000 if everything else 100],
    }
    for name in values.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, values[name], ids=str)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def driver() -> AsyncIterator[Driver]:
    """Return the driver with its processes."""
    # Addresses of sockets are short, which the folders of pytest are not.
    folder = short_folder("kvf-")
    try:
        async with Nursery(folder) as nursery:
            driver = Driver(nursery, folder)
            await driver.learn()
            yield driver
            assert await driver.close() == []
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> list[Verdict]:
    """Return the list that becomes the table."""
    return request.config.stash.setdefault(VERDICTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    if found := config.stash.get(VERDICTS, []):
        terminalreporter.section("faults")
        for line in table_lines(found):
            terminalreporter.write_line(line)
