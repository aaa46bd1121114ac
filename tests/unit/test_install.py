"""An installed kvspan is found wherever Python starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
