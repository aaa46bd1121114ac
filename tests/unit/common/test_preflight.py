"""What this host does not allow is found before a model is read."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.preflight import check_host
from decode_service.config import DecodeConfig
from kvspan.commands.command import EXIT_USAGE


@pytest.fixture
def config(tmp_path: Path) -> DecodeConfig:
    """A config that this host allows."""
    return DecodeConfig(model="tiny:llama", listen=f"unix:{tmp_path}/s", slab_dir=str(tmp_path))


def test_what_is_there_is_accepted(config: DecodeConfig, tmp_path: Path) -> None:
    """The journal may be there or not, the socket not yet."""
    (tmp_path / "old.jsonl").touch()

    for journal in ("", f"{tmp_path}/old.jsonl", f"{tmp_path}/new.jsonl"):
        check_host(replace(config, journal=journal))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"model": "/no/such/folder"}, "model=/no/such/folder: no such folder"),
        ({"slab_dir": "/no/such/folder"}, "slab_dir=/no/such/folder: is not a directory"),
        (
            {"journal": "/no/such/folder/j"},
            "journal=/no/such/folder/j: lies in /no/such/folder, which is not a",
        ),
        ({"journal": "/tmp"}, "journal=/tmp: is there and is not a file"),
        ({"journal": "/proc/self/exe"}, "journal=/proc/self/exe: is a link; name the file that it leads to"),
        ({"slab_dir": "x" * 300}, f"slab_dir={'x' * 300}: File name too long: "),
        ({"journal": "x" * 300}, f"journal={'x' * 300}: File name too long: "),
        ({"journal": "/dev/null"}, "journal=/dev/null: is there and is not a file"),
        (
            {"listen": "unix:/no/such/folder/s"},
            "listen=unix:/no/such/folder/s: directory /no/such/folder does",
        ),
    ],
)
def test_what_is_missing_is_named(config: DecodeConfig, changes: dict[str, Any], refusal: str) -> None:
    """A typing error in a path costs no loading."""
    with pytest.raises(ConfigError) as caught:
        check_host(replace(config, **changes))

    assert str(caught.value).startswith(refusal)


def test_a_port_that_is_taken_is_found_without_a_model(config: DecodeConfig) -> None:
    """The address is looked at first, not after seconds of loading."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        with pytest.raises(ConfigError, match=f"listen={address}: cannot listen: Address already in use"):
            check_host(replace(config, listen=address))


def test_a_host_without_temporary_files_is_told_the_way_out(
    config: DecodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a read-only root needs a tmpfs; torch would say so with a traceback."""
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/such/folder"])

    with pytest.raises(ConfigError, match=r"^TMPDIR=/no/such/folder: .*mount a tmpfs on /tmp$"):
        check_host(config)


@pytest.mark.multiprocess
def test_working_directory_that_was_removed_is_named(tmp_path: Path) -> None:
    """Native libraries look for their files by it; one of them ends the process otherwise."""
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f"cd {gone}; rmdir {gone}; exec {sys.executable} -m kvspan.cli decode"
    command = ["sh", "-c", f"{line} --model=tiny:llama --listen=127.0.0.1:0"]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.startswith(f"kvspan: PWD={gone}: cannot use the working directory: No such file")


def test_slabs_must_find_room(config: DecodeConfig) -> None:
    """Found before a model is read, with both numbers."""
    large = replace(config, slab_bytes=1 << 40, prefill=("unix:/a", "unix:/b"))

    check_host(replace(large, prefill=()))
    with pytest.raises(ConfigError, match=r"slabs take 2097152 MiB of memory, \d+ MiB are available"):
        check_host(large)
