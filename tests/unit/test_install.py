"""An installed kvspan is found wherever Python starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvspan.commands.command import module_command

PACKAGES = ("common", "decode_service", "kvspan", "prefill_service")


def test_a_folder_of_the_same_name_is_not_taken_for_a_package(tmp_path: Path) -> None:
    """A script in the folder above a clone has a folder named kvspan beside it, where no package is."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
    code = "\n".join(f"import {name}; print({name}.__file__)" for name in PACKAGES)
    (tmp_path / "script.py").write_text(code)

    done = subprocess.run(
        [sys.executable, "script.py"], check=True, cwd=tmp_path, capture_output=True, text=True
    )

    assert [Path(line).name for line in done.stdout.split()] == ["__init__.py"] * len(PACKAGES)


def test_another_package_with_the_name_of_ours_is_named(tmp_path: Path) -> None:
    """Python finds what lies beside a script first; the user learns which folder is in the way."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").touch()
    (tmp_path / "script.py").write_text("import kvspan; kvspan.Client")

    done = subprocess.run(
        [sys.executable, "script.py"], check=False, cwd=tmp_path, capture_output=True, text=True
    )

    hint = f"ImportError: {tmp_path}/common/__init__.py hides the package common of kvspan; rename it, or run"
    assert done.stderr.splitlines()[-1].startswith(hint)


def test_services_of_a_pair_start_beside_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the working directory of `kvspan up` is not taken for a part of them."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)

    done = subprocess.run([*module_command("kvspan.cli"), "--help"], check=True, capture_output=True)

    assert b"Commands:" in done.stdout
