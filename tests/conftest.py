"""What every test may rely on: reproducible properties, and a look for what a test left behind.

`leak_check` is opted in with `@pytest.mark.usefixtures("leak_check")` or as a parameter: threads, file
descriptors, child processes and slab sockets must be after the test what they were before. A test that makes
slabs makes them in the directory of the fixture `slab_dir`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvspan.commands.flags import SETTINGS
from tests.support.leaks import assert_no_leak, take_census
from tests.support.places import LONGEST_BASE, short_folder

settings.register_profile(
    "ci",
    # The same examples in every run: a failure is found by the change that caused it.
    derandomize=True,
    # Two cores are shared with services; how long an example takes says nothing.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make a run depend on nothing that its shell says of places, settings and signals."""
    for name in SETTINGS:
        os.environ.pop(f"KVSPAN_{name.upper()}", None)
    # The paths of sockets have to be short.
    if config.option.basetemp is None and len(tempfile.gettempdir()) > LONGEST_BASE:
        config.option.basetemp = short_folder("kv-")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # Under nohup, or behind a shell's &, some are ignored, which a service would inherit and keep to.
        # What is handled here, though by nothing, has its default meaning in another program.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture
def slab_dir(tmp_path: Path) -> Path:
    """Return a fresh directory for the slabs of one test."""
    folder = tmp_path / "slabs"
    folder.mkdir()
    return folder


SETTLE_S = 10.0
"""What is still held after this time is leaked."""


@pytest.fixture(scope="module")
def young_garbage() -> None:
    """Leave what libraries hold out of collections from now on: a look at all of it takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def leak_check(young_garbage: None, slab_dir: Path) -> Iterator[None]:
    """Fail the test when a thread, file descriptor, child process or slab socket outlives it."""
    before = take_census(slab_dir)
    yield
    give_up_s = time.monotonic() + SETTLE_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(AssertionError):
            return assert_no_leak(before, slab_dir)
        time.sleep(0.01)  # grpc closes its sockets on threads of its own
    assert_no_leak(before, slab_dir)
