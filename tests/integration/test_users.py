"""Y24: a user of whom the host knows nothing, as containers have them, is served or told one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvspan.commands.command import EXIT_OK, EXIT_USAGE

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leak_check")]

AS_STRANGER = ("unshare", "--user", "--map-user=12345", "--map-group=12345")
"""Whoever runs the tests, under a number that no passwd file has."""

NOTHING_SET = ("env", "-i")


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    """Skip where this user may not make a namespace."""
    if subprocess.run([*AS_STRANGER, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a user namespace")


def start(folder: Path, model: str) -> subprocess.Popen[str]:
    """Start a decode service as the unknown user, without a home and anything else in its environment."""
    command = [*AS_STRANGER, *NOTHING_SET, sys.executable, "-m", "kvspan.cli", "decode", f"--model={model}"]
    command += [f"--listen=unix:{folder}/s", "--log-level=warning"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_y24_an_unknown_user_without_a_home_is_served(tmp_path: Path) -> None:
    """No library asks who it is, or leaves anything where a home should be."""
    with start(tmp_path, "tiny:llama") as service:
        assert service.stdout is not None
        assert service.stdout.readline() == f"ready unix:{tmp_path}/s\n"
        service.terminate()
        _, err = service.communicate(timeout=60)

    assert (service.returncode, err) == (EXIT_OK, "")


def test_y24_an_unknown_user_without_a_home_is_asked_for_a_cache(tmp_path: Path) -> None:
    """The demo model has to be kept somewhere: one line names the variable."""
    with start(tmp_path, "demo") as service:
        out, err = service.communicate(timeout=60)

    assert (service.returncode, out) == (EXIT_USAGE, "")
    assert err.startswith("kvspan: KVSPAN_CACHE=: name a folder for converted models: ")
    assert err.count("\n") == 1
