"""A run says what it was made on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvspan.bench.environment import PACKAGES, describe_environment, process_cpu_s


def test_environment_names_processor_and_versions() -> None:
    """It is plain JSON and holds what a number may depend on."""
    environment = json.loads(json.dumps(describe_environment()))

    assert set(environment["versions"]) == set(PACKAGES)
    assert environment["num_cores"] >= 1
    assert environment["memory_bytes"] > 1 << 20


def test_cpu_time_is_that_of_user_and_kernel(tmp_path: Path) -> None:
    """A name with spaces and parentheses does not shift the fields."""
    ticks = os.sysconf("SC_CLK_TCK")
    fields = ["S", *map(str, range(4, 14)), str(3 * ticks), str(2 * ticks), "16", "17"]
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "stat").write_text(f"77 (a (b) c) {' '.join(fields)}\n")

    assert process_cpu_s(77, tmp_path) == 5.0
