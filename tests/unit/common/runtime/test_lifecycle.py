"""One signal drains, two end the process, and no child outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.runtime.lifecycle import EXIT_NOW, SIGNALS, EarlyEnd, Lifecycle

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give the signals back to the test run."""
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.parametrize(("exit_code", "expected"), [(None, 128 + signal.SIGTERM), (5, 5)])
def test_signal_before_a_service_listens_leaves_what_runs(exit_code: int | None, expected: int) -> None:
    """Contexts are left, so that nothing half made stays; whoever tells twice does not wait for that."""
    exits: list[int] = []

    with pytest.raises(SystemExit) as ended, EarlyEnd(SIGNALS, exit_code, exits.append):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            left = True
            with contextlib.suppress(SystemExit):
                signal.raise_signal(signal.SIGTERM)

    assert (ended.value.code, left, exits) == (expected, True, [expected])


async def test_signal_that_a_library_swallowed_while_it_loaded_is_not_lost() -> None:
    """What catches everything may run when a signal comes: the service ends as soon as it listens."""
    with pytest.raises(SystemExit), EarlyEnd(SIGNALS, 0):
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)

        with Lifecycle() as lifecycle:
            was_told = lifecycle.ending.is_set()

    assert was_told


@pytest.mark.multiprocess
def test_signal_while_a_native_module_is_loaded_is_taken_after_it() -> None:
    """One that imports others swallows what is raised there, and goes on with half of one."""
    code = (
        "import signal, sys, time; from importlib.machinery import ExtensionFileLoader\n"
        "from common.runtime.lifecycle import SIGNALS, EarlyEnd\n"
        "class Loader(ExtensionFileLoader):\n"
        "    def create_module(self, spec):\n"
        "        signal.raise_signal(signal.SIGTERM); print('loaded', flush=True)\n"
        "with EarlyEnd(SIGNALS, 5): Loader('native', '').create_module(None); time.sleep(600)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, timeout=60, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout, done.stderr) == (5, "loaded\n", "")


def test_handlers_are_given_back_when_no_signal_came() -> None:
    """A command line that runs inside another program changes nothing there; what is ignored stays so."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in SIGNALS]

    with EarlyEnd(SIGNALS) as early:
        within = [signal.getsignal(number) for number in SIGNALS]

    assert within == [early, early, signal.SIG_IGN]
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_first_signal_sets_drain(number: signal.Signals) -> None:
    """SIGTERM, SIGINT and SIGHUP mean the same: stop taking work."""
    exits: list[int] = []

    with Lifecycle(exits.append) as lifecycle:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(lifecycle.ending.wait(), 30)

    assert exits == []


async def test_a_signal_after_the_drain_still_means_an_end_at_once() -> None:
    """A service that has drained ends with exit code 0, however late the second signal comes."""
    exits: list[int] = []
    with Lifecycle(exits.append) as lifecycle:
        lifecycle.receive()

    for number in SIGNALS:
        os.kill(os.getpid(), number)

    assert exits == [EXIT_NOW] * len(SIGNALS)


@pytest.mark.multiprocess
def test_a_signal_while_the_interpreter_ends_changes_nothing() -> None:
    """Not even then is the exit code that of a signal."""
    code = (
        "import asyncio, atexit, os, signal\n"
        "from common.runtime.lifecycle import Lifecycle\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "async def run():\n"
        "    with Lifecycle() as lifecycle: lifecycle.receive()\n"
        "asyncio.run(run())\n"
        "raise SystemExit(5)"
    )

    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, timeout=60)

    assert done.returncode == 5


async def test_second_signal_ends_the_process_at_once() -> None:
    """The operator who asks twice does not wait."""
    exits: list[int] = []
    lifecycle = Lifecycle(exits.append)

    lifecycle.receive()
    lifecycle.receive()

    assert exits == [EXIT_NOW]
    assert lifecycle.ending.is_set()


async def test_files_are_removed_before_a_second_signal_ends_the_process() -> None:
    """An end at once is still an end that leaves nothing behind, with exit code 0."""
    happened: list[str] = []
    lifecycle = Lifecycle(lambda code: happened.append(f"exit {code}"))
    lifecycle.before_exit(lambda: happened.append("removed"))

    lifecycle.receive()
    assert happened == []
    lifecycle.receive()

    assert happened == ["removed", "exit 0"]


async def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """A service under nohup does not end with its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with Lifecycle() as lifecycle:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(lifecycle.ending.wait(), 30)

    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_signals_are_given_back_when_the_context_ends() -> None:
    """Whoever comes after finds the handlers as they were."""
    before = signal.getsignal(signal.SIGTERM)

    with Lifecycle(lambda code: None):
        assert signal.getsignal(signal.SIGTERM) != before

    assert signal.getsignal(signal.SIGTERM) == before


CHILD = """
import os, signal, sys
from common.runtime.lifecycle import end_with_parent
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if not end_with_parent(int(sys.argv[1])): raise SystemExit(3)
os.write(1, b"armed")
signal.sigwait({signal.SIGTERM})
os.write(1, b" told")
"""

PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
sys.stdin.read()
"""


@pytest.mark.multiprocess
def test_child_is_told_when_its_parent_was_killed() -> None:
    """A parent killed outright leaves no orphan: the kernel tells the child."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.read(len(b"armed")) == b"armed"

        parent.kill()

        assert parent.stdout.read() == b" told"


@pytest.mark.multiprocess
def test_child_learns_that_its_parent_is_gone_already() -> None:
    """A parent that ended before the child could ask is reported, so that the child ends by itself."""
    stranger = os.getppid()

    done = subprocess.run([sys.executable, "-c", CHILD, str(stranger)], check=False, cwd=ROOT, timeout=60)

    assert done.returncode == 3


@pytest.mark.multiprocess
def test_parent_that_lives_is_recognised() -> None:
    """The process that started the child counts as alive."""
    code = (
        "import sys; from common.runtime.lifecycle import end_with_parent;"
        "sys.exit(7 if end_with_parent(int(sys.argv[1])) else 8)"
    )

    done = subprocess.run([sys.executable, "-c", code, str(os.getpid())], check=False, cwd=ROOT, timeout=60)

    assert done.returncode == 7
