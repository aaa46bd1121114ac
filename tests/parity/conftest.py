"""Which cases of parity run, and the table of what they found.

Plain runs take a short case; `--full-parity` takes all of them, which is minutes in float32 and more in
bfloat16 where the processor does not compute in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.cases import FULL, SHORT, Outcome, table_lines

OUTCOMES = pytest.StashKey[list[Outcome]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that asks for everything; known when this folder is named on the command line."""
    parser.addoption("--full-parity", action="store_true", help="compare every prompt, dtype and chunk grid")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `case` its values."""
    if "case" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--full-parity", default=False)
        metafunc.parametrize("case", FULL if is_full else SHORT, ids=str)


@pytest.fixture
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[Outcome]]:
    """Return a list for what one test compares; all lists end up in the table."""
    found: list[Outcome] = []
    yield found
    request.config.stash.setdefault(OUTCOMES, []).extend(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    if found := config.stash.get(OUTCOMES, []):
        terminalreporter.section("parity")
        for line in table_lines(found):
            terminalreporter.write_line(line)
